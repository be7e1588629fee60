(() => {
  const box = document.getElementById("live");
  if (!box) return;
  const [status, button] = [box.querySelector("output"), box.querySelector("button")];
  const touched = () =>
    document.querySelector("details[data-used], #item-controls [aria-pressed=true]") ||
    document.querySelector("input[type=search]")?.value;
  document.addEventListener("click", (event) => event.target.closest("details")?.setAttribute("data-used", ""));
  button.addEventListener("click", () => location.reload());
  const source = new EventSource(box.dataset.events);
  source.addEventListener("progress", (event) => {
    const progress = JSON.parse(event.data);
    status.textContent = progress.text;
    if (progress.version === box.dataset.version) return;
    if (touched()) button.hidden = false;
    else location.reload();
  });
  source.addEventListener("error", () => {
    status.textContent = "No connection to the server; the page shows what it knew last.";
  });
})();

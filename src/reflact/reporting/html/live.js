(() => {
  const box = document.getElementById("live");
  if (!box) return;
  const [status, button, facts] = ["output", "button", "dl"].map((name) => box.querySelector(name));
  const touched = () =>
    document.querySelector("[data-used], [aria-pressed=true], [aria-sort]") ||
    document.querySelector("input[type=search]")?.value;
  document.addEventListener("click", (event) => event.target.closest("details")?.setAttribute("data-used", ""));
  button.addEventListener("click", () => location.reload());
  const show = ([label, text]) => {
    const [row, term, words] = ["div", "dt", "dd"].map((name) => document.createElement(name));
    [term.textContent, words.textContent] = [label, text];
    row.append(term, words);
    return row;
  };
  const source = new EventSource(box.dataset.events);
  source.addEventListener("progress", (event) => {
    const progress = JSON.parse(event.data);
    status.textContent = progress.text;
    facts.replaceChildren(...progress.rows.map(show));
    facts.hidden = !progress.rows.length;
    if (progress.version === box.dataset.version) return;
    if (touched()) button.hidden = false;
    else location.reload();
  });
  source.addEventListener("error", () => {
    status.textContent = "No connection to the server; the page shows what it knew last.";
  });
})();

(() => {
  const controls = document.getElementById("run-controls");
  if (!controls) return;
  const body = document.querySelector("#runs tbody");
  const heads = [...document.querySelectorAll("#runs thead th")];
  const search = controls.querySelector("input");
  const order = new Intl.Collator("en", { numeric: true });
  const read = (row, place) => row.children[place].firstChild.textContent.trim();
  const number = (text) => Number.parseFloat(text.replace(/[^0-9.-]/g, ""));
  const compare = (place, isFigure) => (a, b) => {
    const [one, other] = [read(a, place), read(b, place)];
    if (!isFigure) return order.compare(one, other);
    return (number(one) || 0) - (number(other) || 0);
  };
  heads.forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction);
      const isFigure = head.classList.contains("figure") && place > 1;
      const rows = [...body.children].sort(compare(place, isFigure));
      body.append(...(direction === "descending" ? rows.reverse() : rows));
    });
  });
  search.addEventListener("input", () => {
    const words = search.value.trim().toLowerCase();
    for (const row of body.children) row.hidden = !row.textContent.toLowerCase().includes(words);
  });
  controls.hidden = false;
})();

(() => {
  for (const button of document.querySelectorAll(".copy")) {
    if (!navigator.clipboard) break;
    button.hidden = false;
    button.addEventListener("click", async () => {
      const lines = button.closest(".document").querySelectorAll(".block pre");
      await navigator.clipboard.writeText([...lines].map((part) => part.textContent).join(""));
      button.textContent = "Copied";
    });
  }
  const ids = new Intl.Collator("en", { numeric: true });
  const orders = {
    place: (a, b) => a.place - b.place,
    id: (a, b) => ids.compare(a.id, b.id) || a.place - b.place,
    tokens: (a, b) => b.tokens - a.tokens || a.place - b.place,
  };
  for (const matrix of document.querySelectorAll(".matrix")) {
    const list = matrix.querySelector(".items");
    const controls = matrix.querySelector(".controls");
    const items = [...list.children].map((row) => ({
      row,
      id: row.querySelector(".id").textContent,
      text: row.textContent.toLowerCase(),
      outcome: row.dataset.outcome,
      place: Number(row.dataset.place),
      tokens: Number(row.dataset.tokens),
    }));
    const [search, order, count] = ["input", "select", "output"].map((name) => controls.querySelector(name));
    const chosen = new Set();
    const filter = () => {
      const words = search.value.trim().toLowerCase();
      let shown = 0;
      for (const item of items) {
        const fits = (!chosen.size || chosen.has(item.outcome)) && item.text.includes(words);
        item.row.hidden = !fits;
        shown += fits;
      }
      count.textContent = `${shown} of ${items.length} shown`;
    };
    for (const button of controls.querySelectorAll("button")) {
      button.addEventListener("click", () => {
        const outcome = button.dataset.outcome;
        if (!chosen.delete(outcome)) chosen.add(outcome);
        button.setAttribute("aria-pressed", String(chosen.has(outcome)));
        filter();
      });
    }
    search.addEventListener("input", filter);
    order.addEventListener("change", () => {
      items.sort(orders[order.value]);
      list.append(...items.map((item) => item.row));
    });
    controls.hidden = false;
    filter();
  }
})();

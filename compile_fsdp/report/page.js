// Shows what a span is when the pointer or the keyboard is on it. Left and right go along a lane,
// up and down to the neighbouring lane, Home and End to its ends, Escape hides the text.
"use strict";
(function () {
  const tip = document.createElement("div");
  tip.id = "cfsdp-tip";
  tip.setAttribute("role", "status");
  document.body.appendChild(tip);

  function show(span) {
    const box = span.querySelector("rect").getBoundingClientRect();
    tip.textContent = span.dataset.tip;
    tip.style.display = "block";
    const left = Math.min(Math.max(4, box.left), window.innerWidth - tip.offsetWidth - 4);
    const below = box.bottom + 6;
    const fits = below + tip.offsetHeight < window.innerHeight;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, fits ? below : box.top - tip.offsetHeight - 6) + "px";
  }

  function hide() {
    tip.style.display = "none";
  }

  function nearest(spans, span) {
    const x = span.querySelector("rect").getBoundingClientRect().left;
    let best = spans[0];
    for (const other of spans) {
      if (other.querySelector("rect").getBoundingClientRect().left <= x) best = other;
    }
    return best;
  }

  function neighbour(span, key) {
    const lane = span.parentNode;
    const spans = Array.from(lane.querySelectorAll(".span"));
    const lanes = Array.from(lane.parentNode.querySelectorAll("[data-lane]"));
    const at = spans.indexOf(span);
    const row = lanes.indexOf(lane);
    if (key === "ArrowLeft") return spans[at - 1];
    if (key === "ArrowRight") return spans[at + 1];
    if (key === "Home") return spans[0];
    if (key === "End") return spans[spans.length - 1];
    const other = key === "ArrowUp" ? lanes[row - 1] : key === "ArrowDown" ? lanes[row + 1] : null;
    return other ? nearest(Array.from(other.querySelectorAll(".span")), span) : null;
  }

  for (const graph of document.querySelectorAll(".cfsdp-graph")) {
    for (const span of graph.querySelectorAll(".span")) {
      const title = span.querySelector("title");
      if (title) title.remove(); // the text below the span replaces the browser's own
      span.setAttribute("tabindex", "-1");
      span.addEventListener("mouseenter", () => show(span));
      span.addEventListener("mouseleave", hide);
      span.addEventListener("focus", () => show(span));
      span.addEventListener("blur", hide);
      span.addEventListener("keydown", (event) => {
        if (event.key === "Escape") hide();
        const next = neighbour(span, event.key);
        if (!next) return;
        event.preventDefault();
        span.setAttribute("tabindex", "-1");
        next.setAttribute("tabindex", "0");
        next.focus();
        show(next); // a window without the focus gets no focus events
      });
    }
    const first = graph.querySelector(".span");
    if (first) first.setAttribute("tabindex", "0"); // one stop of the Tab key for each graph
  }
})();

"use strict";
// One ruler over all charts, at the same step in each; the legends show the values at that step.
(() => {
  const { last, charts } = JSON.parse(document.getElementById("values").textContent);
  const outputs = [...document.querySelectorAll("output[data-chart]")].map((box) => ({
    box, text: box.textContent, percent: charts[box.dataset.chart].percent,
    line: charts[box.dataset.chart].lines[box.dataset.line],
  }));
  const places = [...document.querySelectorAll(".graph .plot > svg, .lane > svg")];
  const rulers = [...document.querySelectorAll(".graph:not(.lanes) .plot")].map((plot) => {
    const ruler = document.createElement("div");
    ruler.className = "ruler";
    ruler.hidden = true;
    plot.append(ruler);
    return { plot, ruler };
  });
  const write = (value, percent) => {
    if (percent) return `${+(100 * value).toPrecision(3)}%`;
    const size = Math.abs(value);
    if (size >= 1e4) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
    return size >= 1e3 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
  };
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  };
  const show = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    for (const { plot, ruler } of rulers) {
      const frame = plot.getBoundingClientRect();
      const area = plot.querySelector(":scope > svg").getBoundingClientRect();
      ruler.style.left = `${area.left - frame.left + share * area.width}px`;
      ruler.hidden = false;
    }
    for (const { box: output, line, percent } of outputs) {
      const at = nearest(line[0], share * last);
      output.textContent = `${write(line[1][at], percent)} at ${line[0][at].toLocaleString("en")}`;
    }
  };
  const hide = () => {
    for (const { ruler } of rulers) ruler.hidden = true;
    for (const { box, text } of outputs) box.textContent = text;
  };
  for (const place of places) {
    place.addEventListener("pointermove", show);
    place.addEventListener("pointerdown", show);
    place.addEventListener("pointerleave", hide);
  }
})();

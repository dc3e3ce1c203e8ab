// Draws the figures of a page with Plotly, in the page's own colours and letters, each when it comes near the screen.
// A page under way is asked for again every two seconds: what changed is put in its place, the rest is left alone, so
// that scroll, folds and zoom stay.
"use strict";
const EVERY_MS = 2000, HEIGHT = 236, LEGEND_ROW = 19;
const is_dark = matchMedia("(prefers-color-scheme: dark)"), is_touch = matchMedia("(pointer: coarse)").matches;
const seen = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) if (isIntersecting && !target.drawn) draw(target);
}, { rootMargin: "300px" });
const sizes = new ResizeObserver(entries => {
  for (const { target } of entries) if (target.drawn && target.clientWidth) Plotly.Plots.resize(target);
});

function colour(name) {  // of the page, as "--series-1" or, faint, as "--series-1 0.35"
  const [variable, share] = name.split(" ");
  const value = getComputedStyle(document.documentElement).getPropertyValue(variable).trim() || "#888888";
  const long = value.length === 4 ? "#" + [...value.slice(1)].map(digit => digit + digit).join("") : value;
  return share ? long + Math.round(255 * share).toString(16).padStart(2, "0") : long;
}

function legend_rows(traces, width) {
  let rows = 1, left = width;
  for (const { name } of traces) {
    const room = Math.min(width, 44 + 6.4 * name.length);
    if (room > left) { rows += 1; left = width; }
    left -= room;
  }
  return rows;
}

function draw(plot) {
  const is_colour = key => key === "color" || key === "fillcolor";
  const { data, layout } = JSON.parse(plot.dataset.figure, (key, value) => is_colour(key) ? colour(value) : value);
  const named = data.filter(trace => trace.showlegend !== false), has_legend = named.length > 1;
  const rows = has_legend ? legend_rows(named, plot.clientWidth - 60) : 0;
  const axis = { color: colour("--soft"), linecolor: colour("--axis"), gridcolor: colour("--grid"), zeroline: false,
    automargin: true };
  plot.drawn = Plotly.react(plot, data, {
    height: HEIGHT + LEGEND_ROW * rows, autosize: true, margin: { l: 44, r: 8, t: 6 + LEGEND_ROW * rows, b: 38 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: colour("--ink") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x", uirevision: "kept",
    hoverlabel: { bgcolor: colour("--paper"), bordercolor: colour("--rule"), font: { color: colour("--ink") },
      namelength: 24 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--ink") },
    dragmode: is_touch ? false : "zoom", showlegend: has_legend,
    legend: { orientation: "h", x: 0, y: 1, xanchor: "left", yanchor: "bottom", itemclick: "toggle" },
    xaxis: { ...axis, ...layout.xaxis, showgrid: false, showline: true, ticks: "outside", ticklen: 3 },
    yaxis: { ...axis, ...layout.yaxis, nticks: 6 },
  }, { displaylogo: false, displayModeBar: false, responsive: false, doubleClick: "reset", showTips: false });
}

function watch(root) {
  for (const plot of root.querySelectorAll(".plot")) { seen.observe(plot); sizes.observe(plot); }
}

is_dark.addEventListener("change", () => {
  for (const plot of document.querySelectorAll(".plot")) if (plot.drawn) draw(plot);
});
addEventListener("beforeprint", () => document.querySelectorAll(".plot").forEach(draw));
document.addEventListener("DOMContentLoaded", () => watch(document));

// Draws the plots of a page with Plotly, in the page's own colours and letters, each when it comes near the screen.
// A page under way is asked for again every two seconds: what changed is put in its place, the rest is left alone, so
// that scroll, folds and zoom stay.
"use strict";
const EVERY_MS = 2000, HEIGHT = 236, LEGEND_ROW = 19, SMOOTH_FROM = 12;
const is_dark = matchMedia("(prefers-color-scheme: dark)"), is_touch = matchMedia("(pointer: coarse)").matches;
const seen = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) if (isIntersecting && !target.drawn) in_place(() => draw(target));
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

const plain = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");  // Plotly reads HTML
const short = text => text.length > 42 ? `${text.slice(0, 28)} … ${text.slice(-12)}` : text;

function running_mean(values, window) {
  return values.map((_, place) => {
    const run = values.slice(Math.max(0, place - window), place + window + 1).filter(value => value !== null);
    return run.length ? run.reduce((sum, value) => sum + value, 0) / run.length : null;
  });
}

function of_range(values) {
  const known = values.filter(value => value !== null), low = Math.min(...known), high = Math.max(...known);
  return values.map(value => value === null ? null : (value - low) / (high - low || 1));
}

function traces_of(panel) {
  const traces = Object.entries(panel.lines).flatMap(([label, [x, values]], number) => {
    const name = plain(short(label)), ink = `--series-${number % 6 + 1}`;
    const y = panel.relative ? of_range(values) : values;
    if ((panel.smooth.includes(label) || panel.relative) && y.length >= SMOOTH_FROM) return [
      { name, x, y, mode: "lines", showlegend: false, line: { color: colour(`${ink} 0.35`), width: 0.8 } },
      { name, x, y: running_mean(y, Math.max(1, Math.floor(y.length / 40))), mode: "lines", hoverinfo: "skip",
        line: { color: colour(ink), width: 1.6 } },
    ];
    const has_points = panel.marked.includes(label) || y.length < 2, trace = { name, x, y,
      mode: has_points ? "lines+markers" : "lines", line: { color: colour(ink), width: 1.5 }, marker: { size: 6 } };
    const bounds = Object.hasOwn(panel.intervals, label) && panel.intervals[label];
    if (bounds) trace.error_y = { color: colour(ink), thickness: 1.2, width: 3, symmetric: false,
      arrayminus: y.map((value, place) => value - bounds[0][place]), array: y.map((value, place) => bounds[1][place] - value) };
    return [trace];
  });
  const places = traces.flatMap(trace => trace.x), ends = [Math.min(...places), Math.max(...places)];
  for (const [label, height] of Object.entries(panel.levels)) traces.push({ name: plain(label), x: ends,
    y: [height, height], mode: "lines", line: { color: colour("--axis"), width: 1.2, dash: "dash" } });
  return traces;
}

function draw(plot) {
  const panel = JSON.parse(plot.dataset.panel), data = traces_of(panel);
  const named = data.filter(trace => trace.showlegend !== false), has_legend = named.length > 1;
  const rows = has_legend ? legend_rows(named, plot.clientWidth - 60) : 0;
  const steps = data[0]?.x ?? [], is_short = steps.at(-1) - steps[0] < 6;
  const axis = { color: colour("--soft"), linecolor: colour("--axis"), gridcolor: colour("--grid"), zeroline: false,
    automargin: true };
  const below = panel.ticks.length
    ? { tickvals: panel.ticks.map(tick => tick[0]), ticktext: panel.ticks.map(tick => plain(tick[1])) }
    : panel.x_label === "step" ? { tickformat: ",d", dtick: is_short ? 1 : undefined } : {};
  plot.drawn = Plotly.react(plot, data, {
    height: HEIGHT + LEGEND_ROW * rows, autosize: true, margin: { l: 44, r: 8, t: 6 + LEGEND_ROW * rows, b: 38 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: colour("--ink") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x", uirevision: "kept",
    hoverlabel: { bgcolor: colour("--paper"), bordercolor: colour("--rule"), font: { color: colour("--ink") },
      namelength: 24 },
    dragmode: is_touch ? false : "zoom", showlegend: has_legend,
    legend: { orientation: "h", x: 0, y: 1, xanchor: "left", yanchor: "bottom" },
    xaxis: { ...axis, ...below, title: { text: plain(panel.x_label) }, showline: true, showgrid: false, ticks: "outside",
      ticklen: 3 },
    yaxis: { ...axis, rangemode: panel.from_zero ? "tozero" : "normal", nticks: 6 },
  }, { displayModeBar: false, doubleClick: "reset", showTips: false });
}

// What stands at the top of the screen stays there, whatever grows above it.
function in_place(change) {
  const read = [...document.querySelectorAll("section[id], .plot, details, tr")]
    .find(one => one.getBoundingClientRect().top > 0);
  const before = read?.getBoundingClientRect().top;
  change();
  if (scrollY > 0 && read?.isConnected) scrollBy(0, read.getBoundingClientRect().top - before);
}

function watch(root) {
  for (const plot of root.querySelectorAll(".plot")) { seen.observe(plot); sizes.observe(plot); }
}

const gone = new Map();  // id -> element: a stage that is built again has no plots until its first steps

// Make `now` what `next` is, and leave alone what is the same already. Elements are known again by their id, else by
// their place; a fold stays as its reader left it, and a plot keeps its zoom, also where it was gone for a while.
function become(now, next) {
  if (now.nodeType === Node.TEXT_NODE) { if (now.data !== next.data) now.data = next.data; return; }
  const is_plot = now.classList.contains("plot"), is_changed = is_plot && now.dataset.panel !== next.dataset.panel;
  const ours = name => (is_plot && name === "class") || (now.nodeName === "DETAILS" && name === "open");
  for (const { name, value } of next.attributes)
    if (!ours(name) && now.getAttribute(name) !== value) now.setAttribute(name, value);
  for (const { name } of [...now.attributes])
    if (!ours(name) && !next.hasAttribute(name) && !(is_plot && name === "style")) now.removeAttribute(name);
  if (is_plot) { if (is_changed && now.drawn) draw(now); return; }
  let place = now.firstChild;
  for (const child of [...next.childNodes]) {
    let known = child.id ? [...now.children].find(one => one.id === child.id) ?? gone.get(child.id)
      : place && !place.id && place.nodeName === child.nodeName ? place : null;
    if (!known) {
      known = child.cloneNode(false);
      if (child.classList?.contains("plot")) { seen.observe(known); sizes.observe(known); }
    }
    gone.delete(child.id);
    if (known === place) place = place.nextSibling; else now.insertBefore(known, place);
    if (!known.isEqualNode(child)) become(known, child);
  }
  while (place) {
    const left = place;
    place = place.nextSibling;
    left.remove();
    for (const one of left.querySelectorAll?.("[id]") ?? []) gone.set(one.id, one);
    if (left.id) gone.set(left.id, left);
  }
}

async function follow(news) {
  document.documentElement.style.overflowAnchor = "none";  // in_place does it
  let sections = "", seen_at = "";
  for (;;) {
    if (!document.hidden) try {
      const reply = await fetch("sections", { cache: "no-store" }), text = await reply.text();
      if (!reply.ok) throw new Error(text);
      if (text !== sections) {
        const next = document.createElement("main");
        next.innerHTML = sections = text;  // it is escaped as the page is, and runs no script
        in_place(() => become(document.querySelector("main"), next));
      }
      news.className = "news";
      news.textContent = `as of ${seen_at = new Date().toLocaleTimeString("en-GB")}`;
    } catch (error) {
      news.className = "news old";
      news.textContent = `No news since ${seen_at || "the page was opened"}: ` +
        (error instanceof TypeError ? "the command that serves this page has ended." : error.message);
    }
    await new Promise(resolve => setTimeout(resolve, EVERY_MS));
  }
}

is_dark.addEventListener("change", () => {
  for (const plot of document.querySelectorAll(".plot")) if (plot.drawn) draw(plot);
});
addEventListener("beforeprint", () => document.querySelectorAll(".plot").forEach(draw));
document.addEventListener("DOMContentLoaded", () => {
  watch(document);
  const news = document.querySelector("[data-live]");
  if (news) follow(news);
});

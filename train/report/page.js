"use strict";
// Draws what train/report/page.py found: see Page there for the form of `page`.
const page = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function el(parent, name, attributes = {}, text = null) {
  const node = parent.namespaceURI === SVG || name === "svg"
    ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return parent.appendChild(node);
}
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const seriesColour = (k) => { const all = style("--series").split(","); return all[k % all.length].trim(); };

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e4 && size < 1e12) return Math.round(value).toLocaleString("en");
  return size >= 1e-3 && size < 1e4 ? String(+value.toPrecision(4)) : value.toExponential(2);
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(low); e <= Math.ceil(high); e++) if (e >= low - 1e-9 && e <= high + 1e-9) found.push(e);
  const stride = Math.ceil(found.length / 5);
  return found.filter((_, k) => k % stride === 0);
}

// --- Curves ---------------------------------------------------------------------------------------------------------

/** A card for a chart. What it returns draws the chart, once the page is laid out and the card has its width. */
function chartCard(parent, chart) {
  const box = el(parent, "div", { class: "card chart" + (chart.wide ? " wide" : "") });
  const header = el(box, "header");
  el(header, "h3", {}, chart.title);
  if (chart.series.length > 1) drawNames(header, chart.series.map((s, k) => [seriesColour(k), s.name]));
  return () => drawChart(box, chart, header.clientWidth);
}

/** A chart as wide as its card, so that letters have one size on a phone and on a wide screen. */
function drawChart(box, chart, W) {
  const H = chart.wide ? 300 : 210, L = 58, R = 12, T = 12, B = 30;
  const svg = el(box, "svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": chart.title });
  const scale = chart.log ? (v) => Math.log10(v) : (v) => v;
  const usable = (v) => v !== null && (!chart.log || v > 0);
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const s of chart.series) s.x.forEach((x, i) => {
    x0 = Math.min(x0, x); x1 = Math.max(x1, x);
    if (usable(s.y[i])) { const y = scale(s.y[i]); y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
  });
  if (!(y0 <= y1)) { y0 = 0; y1 = 1; }
  if (chart.zero && !chart.log) y0 = Math.min(y0, 0);
  if (y1 - y0 < 1e-9 * Math.max(Math.abs(y0), Math.abs(y1), 1e-12)) { const d = Math.abs(y0) * 0.1 || 1; y0 -= chart.zero ? 0 : d; y1 += d; }
  const margin = (y1 - y0) * 0.04;
  y1 += margin; if (!(chart.zero && y0 === 0)) y0 -= margin;
  if (x1 === x0) { x0 -= 1; x1 += 1; }
  const px = (x) => L + (x - x0) / (x1 - x0) * (W - L - R), py = (y) => H - B - (scale(y) - y0) / (y1 - y0) * (H - T - B);
  const marks = chart.log ? logTicks(y0, y1).map((e) => 10 ** e) : ticks(y0, y1, chart.wide ? 6 : 4);
  for (const y of marks.length > 1 || !chart.log ? marks : ticks(10 ** y0, 10 ** y1, 4).filter((v) => v > 0)) {
    el(svg, "line", { class: "axis", x1: L, x2: W - R, y1: py(y), y2: py(y) });
    el(svg, "text", { x: L - 7, y: py(y) + 4, "text-anchor": "end" }, number(y));
  }
  for (const x of ticks(x0, x1, Math.max(3, Math.round(W / 110))).filter(Number.isInteger))
    el(svg, "text", { x: px(x), y: H - B + 16, "text-anchor": "middle" }, number(x));
  el(svg, "text", { x: W - R, y: H - 2, "text-anchor": "end" }, "step");
  for (const x of page.events || [])
    if (x >= x0 && x <= x1) el(svg, "line", { class: "mark", x1: px(x), x2: px(x), y1: T, y2: H - B });
  chart.series.forEach((s, k) => {
    let path = "", pen = false, alone = 0;
    s.x.forEach((x, i) => {
      if (!usable(s.y[i])) { pen = false; return; }
      path += `${pen ? "L" : "M"}${px(x).toFixed(1)} ${py(s.y[i]).toFixed(1)}`;
      pen = true; alone++;
    });
    const dashed = k % 2 && chart.wide && chart.series.length > 1 ? { "stroke-dasharray": "7 4" } : {};
    el(svg, "path", { class: "curve", d: path, stroke: seriesColour(k), ...dashed });
    if (alone <= 12) s.x.forEach((x, i) => usable(s.y[i]) &&
      el(svg, "circle", { cx: px(x), cy: py(s.y[i]), r: 2.6, fill: seriesColour(k) }));
  });
  hover(box, svg, chart, { W, H, L, R, T, B, x0, x1, px });
}

function drawNames(parent, names) {
  const legend = el(parent, "div", { class: "legend" });
  for (const [colour, name] of names) {
    const item = el(legend, "span");
    el(item, "i", colour === "frame" ? { class: "frame" } : { style: `background:${colour}` });
    item.append(name);
  }
}

function hover(box, svg, chart, g) {
  const cross = el(svg, "line", { class: "cross", y1: g.T, y2: g.H - g.B, visibility: "hidden" });
  const tip = el(box, "div", { class: "tip", hidden: "" });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); });
  svg.addEventListener("pointermove", (event) => {
    const area = svg.getBoundingClientRect();
    const at = (event.clientX - area.left) / area.width * g.W;
    const x = g.x0 + (at - g.L) / (g.W - g.L - g.R) * (g.x1 - g.x0);
    const lines = [];
    let step = null;
    chart.series.forEach((s) => {
      let best = -1;
      s.x.forEach((sx, i) => { if (best < 0 || Math.abs(sx - x) < Math.abs(s.x[best] - x)) best = i; });
      if (best < 0) return;
      step = step ?? s.x[best];
      if (s.x[best] === step) lines.push((chart.series.length > 1 ? s.name + ": " : "") +
        (s.y[best] === null ? "not a number" : number(s.y[best])));
    });
    if (step === null) return;
    for (const [key, value] of [["x1", g.px(step)], ["x2", g.px(step)], ["visibility", "visible"]]) cross.setAttribute(key, value);
    tip.replaceChildren(...[`step ${step}`, ...lines].map((t) => { const d = document.createElement("div"); d.textContent = t; return d; }));
    tip.hidden = false;
    const left = event.clientX - box.getBoundingClientRect().left;
    tip.style.left = `${Math.max(0, Math.min(left + 14, box.clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${event.clientY - box.getBoundingClientRect().top + 14}px`;
  });
}

// --- Load of experts ------------------------------------------------------------------------------------------------

function rgb(name) {
  const hex = style(name).slice(1), full = hex.length === 3 ? [...hex].map((c) => c + c).join("") : hex;
  return [0, 2, 4].map((i) => parseInt(full.slice(i, i + 2), 16));
}

function drawHeat(parent, heat) {
  const box = el(parent, "div", { class: "card" });
  const scale = el(box, "div", { class: "scale" });
  scale.append("none"); el(scale, "i"); scale.append("twice the mean or more; an even load is the middle. " +
    "One row is an expert, time runs to the right.");
  const grid = el(box, "div", { class: "heat" });
  const bytes = Uint8Array.from(atob(heat.values), (c) => c.charCodeAt(0));
  const [steps, layers, experts] = heat.shape;
  const low = rgb("--low"), even = rgb("--even"), high = rgb("--high");
  for (let layer = 0; layer < layers; layer++) {
    const figure = el(grid, "figure");
    const canvas = el(figure, "canvas", { width: steps, height: experts });
    const context = canvas.getContext("2d"), image = context.createImageData(steps, experts);
    for (let s = 0; s < steps; s++) for (let e = 0; e < experts; e++) {
      const part = Math.min(bytes[(s * layers + layer) * experts + e] / heat.one, 2);
      const [from, to, t] = part < 1 ? [low, even, part] : [even, high, part - 1];
      const at = 4 * (e * steps + s);
      for (let c = 0; c < 3; c++) image.data[at + c] = from[c] + (to[c] - from[c]) * t;
      image.data[at + 3] = 255;
    }
    context.putImageData(image, 0, 0);
    const caption = el(figure, "figcaption");
    el(caption, "span", {}, `layer ${layer + 1} of ${layers} with experts`);
    const title = el(caption, "span", {}, `${experts} experts`);
    canvas.addEventListener("pointermove", (event) => {
      const area = canvas.getBoundingClientRect();
      const s = Math.min(steps - 1, Math.max(0, Math.floor((event.clientX - area.left) / area.width * steps)));
      const e = Math.min(experts - 1, Math.max(0, Math.floor((event.clientY - area.top) / area.height * experts)));
      const part = bytes[(s * layers + layer) * experts + e] / heat.one;
      title.textContent = `step ${heat.steps[s]}, expert ${e}: ${part.toFixed(2)} x mean`;
    });
    canvas.addEventListener("pointerleave", () => { title.textContent = `${experts} experts`; });
  }
}

// --- Timelines ------------------------------------------------------------------------------------------------------

function drawTimelines(parent, group) {
  const box = el(parent, "div", { class: "card timeline" });
  drawNames(box, group.legend);
  const W = 1200, L = 52, R = 8, row = 24;
  const longest = Math.max(...group.timelines.map((t) => t.makespan)) || 1;
  const px = (t) => L + t / longest * (W - L - R);
  for (const t of group.timelines) {
    const H = 34 + row * t.ranks + 24;
    const svg = el(box, "svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": t.title });
    el(svg, "text", { x: L, y: 22, class: "rank", style: "font-weight:600;font-size:12.5px" }, t.title);
    for (let r = 0; r < t.ranks; r++) {
      el(svg, "text", { x: L - 8, y: 34 + row * (r + 0.5) + 4, "text-anchor": "end", class: "rank" }, `rank ${r}`);
      el(svg, "rect", { class: "empty", x: px(0), y: 35 + row * r, width: px(t.makespan) - px(0), height: row - 2 });
    }
    for (const [rank, part, parts, start, end, colour, ink, label, title] of t.boxes) {
      const height = (row - 2) / parts, y = 35 + row * rank + part * height, width = Math.max(px(end) - px(start), 0.4);
      const rect = el(svg, "rect", { x: px(start), y, width, height, fill: colour });
      el(rect, "title", {}, title);
      const size = Math.min(10.5, 0.86 * height, width / (0.62 * label.length + 0.25));
      if (size >= 5) el(svg, "text", { x: px(start) + width / 2, y: y + height / 2 + 0.36 * size, "text-anchor": "middle",
        style: `font-size:${size.toFixed(1)}px;fill:${ink};pointer-events:none` }, label);
    }
    for (const [rank, start, end] of t.pairs)
      el(svg, "rect", { class: "pair", x: px(start), y: 35 + row * rank, width: px(end) - px(start), height: row - 2 });
    for (const x of ticks(0, longest, 8)) {
      if (px(x) > W - R - 40) continue;
      el(svg, "text", { x: px(x), y: H - 6, "text-anchor": x ? "middle" : "start" }, number(x));
    }
    el(svg, "text", { x: W - R, y: H - 6, "text-anchor": "end" }, t.unit);
  }
}

// --- The page -------------------------------------------------------------------------------------------------------

function drawTable(parent, table) {
  const box = el(parent, "div", { class: "card" });
  if (table.title) el(box, "h3", {}, table.title);
  const node = el(box, "table");
  if (table.head) { const row = el(el(node, "thead"), "tr"); for (const cell of table.head) el(row, "th", {}, cell); }
  const body = el(node, "tbody");
  for (const [name, ...cells] of table.rows) {
    const row = el(body, "tr");
    el(row, "th", {}, name);
    for (const cell of cells) if (typeof cell === "object") el(el(row, "td"), "b", {}, cell.own); else el(row, "td", {}, cell);
  }
}

function draw() {
  const main = document.createElement("main"), charts = [];
  el(main, "h1", {}, page.title);
  el(main, "p", {}, page.about);
  for (const alarm of page.alarms || []) el(main, "div", { class: "card alarm" }, alarm);
  const tiles = el(main, "div", { class: "tiles" });
  for (const [value, name] of page.tiles) {
    const tile = el(tiles, "div", { class: "card" });
    el(tile, "b", {}, value); el(tile, "span", {}, name);
  }
  for (const section of page.sections) {
    el(main, "h2", {}, section.title);
    if (section.about) el(main, "p", {}, section.about);
    if (section.charts) { const grid = el(main, "div", { class: "charts" }); charts.push(...section.charts.map((c) => chartCard(grid, c))); }
    if (section.heat) drawHeat(main, section.heat);
    for (const group of section.timelines || []) drawTimelines(main, group);
    if (section.tables) {
      const grid = el(main, "div", { class: section.tables.length > 1 ? "tables" : "" });
      section.tables.forEach((t) => drawTable(grid, t));
    }
    if (section.text) el(main, "pre", {}, section.text);
  }
  document.querySelector("main")?.remove();
  document.body.append(main);
  for (const drawn of charts) drawn();
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

"use strict";
/* The page: controls, figures and table of what player.js plays and painter.js draws. */

const $ = (id) => document.getElementById(id);
let state;
let followed = null; // { of: played or second, rank, index }, or with links instead of an index where a rank idles
let chained = null; // [rank, index] of slots that wait for each other

/* ---- state: what the controls say, and the address's fragment ---- */

const SLIDERS = [
  { id: "F", text: "F forward", group: "costs", min: 0.05, max: 3, step: 0.01, time: true },
  { id: "I", text: "I backward for input", group: "costs", min: 0.05, max: 3, step: 0.01, time: true },
  { id: "W", text: "W backward for weights", group: "costs", min: 0.05, max: 3, step: 0.01, time: true },
  { id: "pair", text: "pair, of F + I + W", group: "costs", min: 0.4, max: 1.1, step: 0.01,
    show: (value, s) => `${Math.round(100 * value)} % = ${took(pairTime(s))}` },
  { id: "send", text: "send", group: "costs", min: 0, max: 1, step: 0.01, time: true },
  { id: "node", text: "ranks of a node", group: "costs", min: 1, max: 16, step: 1 },
  { id: "inside", text: "send in a node", group: "costs", min: 0, max: 1, step: 0.01, time: true },
  { id: "head", text: "head, heavier last stage", group: "costs", min: 0, max: 1, step: 0.01,
    show: (value) => `+${Math.round(100 * value)} %` },
  { id: "jitter", text: "jitter", group: "costs", min: 0, max: 0.5, step: 0.01, show: (value) => `${Math.round(100 * value)} %` },
  { id: "residual_i", text: "kept for I", group: "sizes", min: 0, max: 4, step: 0.05 },
  { id: "residual_w", text: "kept for W", group: "sizes", min: 0, max: 4, step: 0.05 },
  { id: "stash", text: "handed from I to W", group: "sizes", min: 0, max: 4, step: 0.05 },
  { id: "boundary", text: "input of a stage", group: "sizes", min: 0, max: 2, step: 0.05 },
  { id: "parameters", text: "parameters, gradients, optimizer", group: "sizes", min: 0, max: 100, step: 0.5 },
  { id: "fixed", text: "whatever the schedule", group: "sizes", min: 0, max: 100, step: 0.5 },
];
const ranksAxis = () => [...new Set(data.points.map(([ranks]) => ranks))];
const microbatchesAxis = (ranks) => data.points.filter(([r]) => r === ranks).map(([, m]) => m);
const nearest = (values, wanted) =>
  values.reduce((best, value) => (Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best));

/** The state that a fragment such as #schedule=zb_v&ranks=8&FB=2.2 asks for; the rest as at the start. */
function fromFragment(fragment) {
  const asked = new URLSearchParams(fragment), s = { ...data.start };
  for (const id of Object.keys(s)) {
    const text = asked.get(id);
    if (text === null) continue;
    if (id === "schedule" || id === "beside") s[id] = Object.hasOwn(data.schedules, text) ? text : s[id];
    else if (id === "blocking") s.blocking = text === "true";
    else if (Number.isFinite(Number(text)) && Number(text) >= 0) s[id] = Number(text);
  }
  if (asked.has("FB") && Number(asked.get("FB")) >= 0) s.pair = Number(asked.get("FB")) / (s.F + s.I + s.W);
  s.node = Math.max(1, Math.round(s.node));
  s.ranks = nearest(ranksAxis(), s.ranks);
  s.microbatches = nearest(microbatchesAxis(s.ranks), s.microbatches);
  if (asked.get("theme")) document.documentElement.dataset.theme = asked.get("theme");
  return s;
}

function toFragment(s) {
  const always = ["schedule", "ranks", "microbatches"];
  const said = Object.keys(s).filter((id) => always.includes(id) || s[id] !== data.start[id]);
  return "#" + new URLSearchParams(said.map((id) => [id, s[id]]));
}

function change(more) {
  Object.assign(state, more);
  if (!microbatchesAxis(state.ranks).includes(state.microbatches))
    state.microbatches = nearest(microbatchesAxis(state.ranks), state.microbatches);
  history.replaceState(null, "", toFragment(state));
  chained = followed = null;
  update();
}

/* ---- numbers ---- */

/** Four digits; thousands of a large one as a letter. */
function round(value) {
  for (const [letter, unit] of [["T", 1e12], ["G", 1e9], ["M", 1e6]])
    if (value >= unit) return Number((value / unit).toPrecision(4)) + letter;
  return String(Number(value.toPrecision(4)));
}
const took = (value) => `${round(value)} ${data.units.time}`.trim();

function size(value) {
  if (data.units.memory !== "B") return `${round(value)} ${data.units.memory}`.trim();
  for (const [name, unit] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (value >= unit) return `${Number((value / unit).toPrecision(4))} ${name}`;
  return `${Number(value.toPrecision(4))} B`;
}
const percent = (value) => `${(100 * value).toFixed(1)}\u00a0%`;
const countsMemory = () =>
  state.residual_i === 1 && !data.kept.length && ["residual_w", "stash", "boundary", "parameters", "fixed"].every((id) => !state[id]);
const kept = (value) => (countsMemory() ? round(value) : size(value));

/* ---- controls ---- */

const make = (tag, attributes = {}, ...inside) => {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...inside);
  return element;
};

function slider(id, text, range) {
  const input = make("input", { id, type: "range", ...range });
  const label = make("label", { className: "slider" }, make("span", {}, text), make("output", { id: `${id}-value` }), input);
  return [label, input];
}

/** The range of a slider: wide enough for the costs and sizes that the page began with, in whatever unit. */
function reach({ id, min, max, step, time }) {
  const { F, I, W, send } = data.start, given = Math.max(data.start[id], time ? Math.max(F, I, W, send) : 0);
  if (!given || (given <= max && given >= 10 * step)) return { min, max, step };
  const unit = 10 ** Math.floor(Math.log10(given) - 1);
  return { min: min ? unit / 2 : 0, max: 3 * given, step: "any" };
}

function buildControls() {
  $("beside").append(make("option", { value: "" }, "nothing beside it"));
  for (const name of Object.keys(data.schedules))
    for (const id of ["schedule", "beside"]) $(id).append(make("option", { value: name }, name));
  for (const id of ["schedule", "beside"]) $(id).onchange = () => change({ [id]: $(id).value });
  for (const [id, axis] of [["ranks", ranksAxis], ["microbatches", () => microbatchesAxis(state.ranks)]]) {
    const [label, input] = slider(id, id, { min: 0, step: 1 });
    input.oninput = () => change({ [id]: axis()[Number(input.value)] });
    $("shape").append(label);
  }
  for (const { text, group, ...range } of SLIDERS) {
    const [label, input] = slider(range.id, text, range.id === "node" ? range : reach(range));
    input.oninput = () => change({ [range.id]: Number(input.value) });
    $(group).append(label);
  }
  const box = make("input", { id: "blocking", type: "checkbox", onchange: () => change({ blocking: box.checked }) });
  $("costs").append(make("label", { className: "check" }, box, " a send keeps its sender too"));
  if (data.units.time) $("costs-name").append(`, ${data.units.time}`);
  if (data.extra.length)
    $("costs").append(make("p", {}, "plus " + data.extra.map(([stage, ...more]) => `${more} (F, I, W) at stage ${stage}`).join(", ")));
  if (data.kept.length)
    $("sizes").append(make("p", {}, "plus " + data.kept.map(([stage, more]) => `${size(more)} at stage ${stage}`).join(", ")));
  for (const [text, costs, how] of data.presets) buildPreset(text, costs, how);
  $("presets").after(make("p", { id: "how" }));
}

/** A preset says how costs relate; where they have a unit, F stays as it was at the start. */
function buildPreset(text, costs, how) {
  const unit = data.units.time && data.start.F ? data.start.F / costs.F : 1;
  const scaled = { ...costs, F: unit * costs.F, I: unit * costs.I, W: unit * costs.W };
  const onclick = () => { change(scaled); $("how").textContent = how; };
  $("presets").append(make("button", { type: "button", title: how, onclick }, text));
}

function showControls() {
  $("schedule").value = state.schedule;
  $("beside").value = state.beside;
  for (const [id, axis] of [["ranks", ranksAxis()], ["microbatches", microbatchesAxis(state.ranks)]]) {
    Object.assign($(id), { max: axis.length - 1, value: axis.indexOf(state[id]) });
    $(id).setAttribute("aria-valuetext", state[id]);
    $(`${id}-value`).textContent = state[id];
  }
  for (const { id, show, group } of SLIDERS) {
    $(id).value = state[id];
    $(`${id}-value`).textContent = show ? show(state[id], state) : group === "sizes" ? size(state[id]) : round(state[id]);
  }
  $("inside").parentElement.hidden = state.node === 1;
  $("blocking").checked = state.blocking;
}

/* ---- figures, table, legend ---- */

let played, second;

function update() {
  const all = Object.keys(data.schedules).map((name) => play(name, state));
  played = all.find(({ name }) => name === state.schedule);
  second = all.find(({ name, reason }) => name === state.beside && !reason);
  showControls();
  $("title").textContent = `${state.schedule}, ${state.ranks} ranks, ${state.microbatches} microbatches`;
  document.title = $("title").textContent;
  $("about").textContent = data.about[state.schedule] || "";
  $("refused").hidden = !played.reason;
  $("drawing").hidden = Boolean(played.reason);
  showFigures();
  showTable(all);
  showSpread(all);
  if (played.reason) refuse();
  else { showLegend(); draw(); }
}

function showFigures() {
  const { reason, makespan, bubble, peak, busy, schedule, costs } = played;
  const mean = () => busy.reduce((a, b) => a + b, 0) / schedule.ranks;
  const values = reason ? {} : { makespan, bubble, memory: peak, ideal: mean(), bound: bound(schedule, costs) };
  const written = { makespan: took, bubble: percent, memory: kept, ideal: took, bound: took };
  for (const id of Object.keys(written)) {
    $(id).textContent = id in values ? written[id](values[id]) : "\u2013";
    if (id in values) $(id).dataset.value = values[id];
    else delete $(id).dataset.value;
  }
  played.bound = values.bound;
  if (second) second.bound = bound(second.schedule, second.costs);
  $("memory-name").textContent = countsMemory() ? "peak activations" : "peak memory";
}

/** Says why there is no such schedule, and offers the nearest counts at which there is. */
function refuse() {
  const [text, button] = $("refused").children;
  text.textContent = played.reason;
  const served = data.points.filter((point) => typeof data.schedules[state.schedule][point] === "object");
  const away = ([r, m]) => 4 * Math.abs(r - state.ranks) + Math.abs(m - state.microbatches);
  const to = served.reduce((best, point) => (away(point) < away(best) ? point : best), served[0]);
  button.hidden = !to || !away(to);
  if (button.hidden) return;
  button.textContent = `show ${to[0]} ranks, ${to[1]} microbatches`;
  button.onclick = () => change({ ranks: to[0], microbatches: to[1] });
}

function showTable(all) {
  const order = (row) => row.makespan ?? Infinity;
  const most = Math.max(...all.map((row) => row.makespan ?? 0)), least = Math.min(...all.map(order));
  $("caption").textContent = `All schedules at ${state.ranks} ranks and ${state.microbatches} microbatches, fastest first`;
  $("other").textContent = `send ${round(otherSend(state))}`;
  const rows = [...all].sort((a, b) => order(a) - order(b)).map((row) => {
    const name = make("button", { type: "button", onclick: () => change({ schedule: row.name }) }, row.name);
    const line = make("tr", {}, make("td", {}, name));
    line.dataset.schedule = row.name;
    if (row.name === state.schedule) line.setAttribute("aria-current", "true");
    if (row.reason) line.append(make("td", { colSpan: state.jitter ? 8 : 7, className: "reason" }, row.reason));
    else fillRow(line, row, most, least);
    return line;
  });
  const focused = document.activeElement?.closest?.("#table tr")?.dataset.schedule;
  $("table").replaceChildren(...rows);
  if (focused) rows.find((row) => row.dataset.schedule === focused)?.querySelector("button").focus();
}

function fillRow(line, { makespan, other, bubble, peak, schedule, pairs }, most, least) {
  Object.assign(line.dataset, { makespan, other, bubble, memory: peak });
  const slower = makespan > least * 1.0005 ? `+${(100 * (makespan / least - 1)).toFixed(1)} %` : "";
  const bar = make("div", {}, round(makespan), make("small", {}, slower));
  bar.style.width = `${(100 * makespan) / most}%`;
  const late = state.jitter ? ["\u2026"] : [];
  const cells = [round(other), ...late, percent(bubble), kept(peak), schedule.held[0].length, `${schedule.pipes.length}x`, pairs ? "yes" : ""];
  line.append(make("td", { className: "wide" }, bar), ...cells.map((text) => make("td", {}, text)));
}

const RUNS = 100;
let spreading = 0;

/** The 95th percentile under jitter of every schedule, one after the other while the page stays alive. */
function showSpread(all) {
  const turn = ++spreading, left = state.jitter ? all.filter((row) => !row.reason) : [];
  left.sort((a, b) => (b.name === state.schedule) - (a.name === state.schedule) || a.makespan - b.makespan);
  $("spread").hidden = $("spread-name").hidden = !state.jitter;
  $("spread-name").textContent = $("late-name").textContent = `95 % at ${percent(state.jitter)} jitter`;
  $("late").textContent = "\u2026";
  const next = () => {
    const row = turn === spreading && left.shift();
    if (!row) return;
    const [median, late] = jittered(row.schedule, row.costs, state.jitter, RUNS);
    const line = [...$("table").children].find((each) => each.dataset.schedule === row.name);
    Object.assign(line.dataset, { median, late });
    line.children[3].textContent = round(late);
    if (row.name === state.schedule) $("late").textContent = took(late);
    setTimeout(next);
  };
  setTimeout(next);
}

function showLegend() {
  const { schedule, pairs, idle, makespan } = played, shades = numShades(schedule);
  const used = new Set(schedule.slots.flat().flatMap((slot) => actionsOf(slot).map(([op]) => op)));
  const swatch = (colour) => { const i = make("i"); i.style.background = colour; return i; };
  const entries = [F, B, I, W].filter((op) => used.has(op)).map((op) =>
    make("span", {}, ...Array.from({ length: shades }, (_, at) => swatch(colour(op, at, shades))), `${OPS[op]} ${data.names[op]}`));
  if (pairs) entries.push(make("span", {}, make("i", { className: "frame" }), "overlapped pair"));
  if (Math.max(...idle) > HAIR * makespan) entries.push(make("span", {}, make("i", { className: "idle" }), "idle"));
  if (shades > 1) entries.push(make("span", {}, `shade: ${shadeNames(schedule).join(", ")}`));
  $("legend").replaceChildren(...entries);
}

/* ---- following a microbatch ---- */

function follow(place) {
  if (JSON.stringify({ ...place, of: 0 }) === JSON.stringify({ ...followed, of: 0 }) && place?.of === followed?.of) return;
  followed = place;
  if (place) $("readout").textContent = place.links ? readWait(place) : readSlot(place);
  draw();
}

function readSlot({ of, rank, index }) {
  const { starts, ends, memory, idle, schedule } = of, start = starts[rank][index], { times, amounts } = memory[rank];
  const keeps = amounts[times.findLastIndex((time) => time <= start)];
  return `rank ${rank}: ${spelt(schedule.slots[rank][index])}, from ${round(start)} to ${took(ends[rank][index])}; ` +
    `the rank keeps ${kept(keeps)}, idles ${took(idle[rank])} in all`;
}

function readWait({ of, rank, links }) {
  const told = links.map(([r, i]) => `rank ${r}'s ${spelt(of.schedule.slots[r][i])}`), shown = told.slice(1, 8).join(", that for ");
  return `rank ${rank} idles: ${told[0]} waits for ${shown}${told.length > 8 ? " and so on" : ""}`;
}

function placeAt(event, shown, canvas) {
  const g = geometry(shown), box = canvas.getBoundingClientRect();
  const rank = Math.floor((event.clientY - box.top - TOP) / g.row), x = event.clientX - box.left, time = (x - g.x(0)) / g.scale;
  if (!(rank in shown.schedule.slots) || time < 0 || time > shown.makespan) return null;
  const index = shown.ends[rank].findIndex((end, i) => end > time && shown.starts[rank][i] <= time);
  if (index >= 0) return { of: shown, rank, index };
  const links = whyIdle(shown, rank, time);
  return links.length > 1 ? { of: shown, rank, links } : null;
}

function walk(event) {
  const { rank, index } = followed?.index !== undefined ? followed : { rank: 0, index: -1 }, { slots } = played.schedule;
  const to = { ArrowRight: [rank, index + 1], ArrowLeft: [rank, index - 1], ArrowDown: [rank + 1, index], ArrowUp: [rank - 1, index] }[event.key];
  if (event.key === "Escape") follow(null);
  if (!to) return;
  event.preventDefault();
  const on = Math.max(0, Math.min(slots.length - 1, to[0]));
  follow({ of: played, rank: on, index: Math.max(0, Math.min(slots[on].length - 1, to[1])) });
}

function listen() {
  for (const id of ["canvas", "second"]) {
    $(id).onmousemove = (event) => follow(placeAt(event, id === "canvas" ? played : second, $(id)));
    $(id).onmouseleave = () => follow(null);
  }
  $("canvas").onblur = () => follow(null);
  $("canvas").onkeydown = walk;
  $("scroller").onscroll = draw;
  $("zoom").oninput = draw;
  $("theme").onclick = () => {
    const root = document.documentElement;
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    draw();
  };
  $("chain").onclick = () => { chained = chained ? null : criticalPath(played); draw(); };
  document.body.ondragover = (event) => event.preventDefault();
  document.body.ondrop = drop;
  $("save-json").onclick = () => save(`${played.name}.json`, new Blob([writeSchedule(played)], { type: "application/json" }));
  $("save-png").onclick = () => picture().toBlob((blob) => save(`${played.name}.png`, blob));
  window.onresize = draw;
  window.onhashchange = () => { state = fromFragment(location.hash.slice(1)); update(); };
}

/* ---- files in and out ---- */

function takeIn(text) {
  const schedule = readSchedule(text), { ranks, microbatches } = schedule;
  const name = Object.hasOwn(data.schedules, schedule.name) ? `${schedule.name}, as given` : schedule.name;
  if (!Object.hasOwn(data.schedules, name))
    for (const id of ["schedule", "beside"]) $(id).append(make("option", { value: name }, name));
  Object.defineProperty(data.schedules, name, { value: {}, enumerable: true, configurable: true });
  decoded.set(`${name},${ranks},${microbatches}`, schedule);
  if (!data.points.some(([r, m]) => r === ranks && m === microbatches)) data.points.push([ranks, microbatches]);
  data.points.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  change({ schedule: name, ranks, microbatches });
}

async function drop(event) {
  event.preventDefault();
  const [file] = event.dataTransfer.files;
  try { if (file) takeIn(await file.text()); }
  catch (error) { $("readout").textContent = `${file.name}: ${error.message}`; }
}

function save(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href));
}

async function main() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  data = await unpack($("payload").textContent);
  state = fromFragment(location.hash.slice(1));
  const same = Object.keys(data.start).every((id) => ["beside", "jitter"].includes(id) || state[id] === data.start[id]);
  chained = same && data.chain.length ? data.chain : null;
  buildControls();
  listen();
  update();
  document.body.dataset.ready = "true";
}

main().catch((error) => {
  document.body.dataset.error = error;
  $("about").textContent = `This page could not start: ${error}`;
});

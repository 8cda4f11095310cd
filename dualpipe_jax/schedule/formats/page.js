"use strict";
/* Plays schedules that Python wrote. No order is made here: see page.py for what the payload holds. */

const $ = (id) => document.getElementById(id);
const OPS = ["F", "B", "I", "W"];
const F = 0, B = 1, I = 2, W = 3;
let data, state;

/* ---- the payload ---- */

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new DecompressionStream("deflate"), writer = stream.writable.getWriter();
  writer.write(bytes);
  writer.close();
  return new Response(stream.readable).json();
}

const decoded = new Map();

/** The schedule of a name at some counts: decoded, or the reason why there is none. */
function lookUp(name, ranks, microbatches) {
  const key = `${name},${ranks},${microbatches}`;
  if (!decoded.has(key)) {
    const entry = data.schedules[name][`${ranks},${microbatches}`];
    const missing = `This page holds no order of ${name} for ${ranks} ranks and ${microbatches} microbatches.`;
    decoded.set(key, typeof entry === "object" ? decode(entry) : { reason: entry || missing });
  }
  return decoded.get(key);
}

/** Slots of each rank: [op, stage, microbatch], or both of a pair one after the other. */
function decode({ pipes, orders }) {
  const depth = pipes[0].length, rankOf = pipes.flat();
  const held = orders.map((_, rank) => [...rankOf.keys()].filter((stage) => rankOf[stage] === rank));
  const slots = orders.map((order, rank) => {
    const next = new Map(), found = [];
    let slot = [];
    for (const [, letter, number, plus] of order.matchAll(/([^\d+])(\d*)(\+?)/g)) {
      const code = letter.charCodeAt(0) - 65, stage = held[rank][code >> 2];
      const microbatch = number ? Number(number) : next.get(code) || 0;
      next.set(code, microbatch + 1);
      slot.push(code & 3, stage, microbatch);
      if (!plus) { found.push(slot); slot = []; }
    }
    return found;
  });
  const count = 1 + slots.flat(1).reduce((most, slot) => Math.max(most, slot[2], slot[5] || 0), 0);
  return { pipes, depth, rankOf, held, slots, count, ranks: orders.length, parts: depth / orders.length };
}

/* ---- the simulation: the same rules as simulate.py ---- */

/** Costs of one stage: a rank's share over the stages that it makes; sends and extras as they are. */
function stageCosts(schedule, s) {
  const k = schedule.parts;
  const extra = data.extra.filter(([stage]) => -schedule.depth <= stage && stage < schedule.depth)
    .map(([stage, ...more]) => [(stage + schedule.depth) % schedule.depth, more]);
  if (s.head) extra.push([schedule.depth - 1, [s.F, s.I, s.W].map((cost) => s.head * cost)]);
  const more = new Map();
  for (const [stage, [f, i, w]] of extra) {
    const had = more.get(stage) || [0, 0, 0, 0];
    more.set(stage, [had[F] + f, had[B] + i + w, had[I] + i, had[W] + w]);
  }
  const alone = [s.F, s.I + s.W, s.I, s.W].map((cost) => cost / k);
  return { alone, pair: pairTime(s) / k, send: s.send, blocking: s.blocking, more };
}

const pairTime = (s) => s.pair * (s.F + s.I + s.W);

function duration(slot, costs, depth) {
  let time = slot.length > 3 ? costs.pair : costs.alone[slot[0]];
  for (let at = 0; at < slot.length; at += 3) {
    const more = costs.more.get(slot[at + 1] % depth);
    if (more) time += more[slot[at]];
  }
  return time;
}

function simulate(schedule, costs) {
  const { slots, rankOf, depth, count, ranks } = schedule;
  const y = new Float64Array(rankOf.length * count).fill(NaN), dx = y.slice();
  const starts = slots.map(() => []), ends = slots.map(() => []), free = slots.map(() => 0);
  const arrival = (values, stage, microbatch, rank) =>
    values[stage * count + microbatch] + (rankOf[stage] === rank ? 0 : costs.send);

  /** When all that an action reads is here; NaN where it is not made yet. */
  function ready(op, stage, microbatch, rank) {
    const at = stage % depth;
    if (op === W) return arrival(dx, stage, microbatch, rank);
    if (op === F) return at === 0 ? 0 : arrival(y, stage - 1, microbatch, rank);
    const own = arrival(y, stage, microbatch, rank);
    return at === depth - 1 ? own : Math.max(own, arrival(dx, stage + 1, microbatch, rank));
  }

  function leaves(op, stage) {
    const reader = op === F ? stage + 1 : stage - 1, at = stage % depth;
    return op !== W && at !== (op === F ? depth - 1 : 0) && rankOf[reader] !== rankOf[stage];
  }

  function run(rank) {
    const slot = slots[rank][starts[rank].length];
    let start = free[rank], sent = false;
    for (let at = 0; at < slot.length; at += 3) start = Math.max(start, ready(slot[at], slot[at + 1], slot[at + 2], rank));
    if (Number.isNaN(start)) return false;
    const end = start + duration(slot, costs, depth);
    for (let at = 0; at < slot.length; at += 3) {
      if (slot[at] !== W) (slot[at] === F ? y : dx)[slot[at + 1] * count + slot[at + 2]] = end;
      sent = sent || leaves(slot[at], slot[at + 1]);
    }
    starts[rank].push(start);
    ends[rank].push(end);
    free[rank] = end + (costs.blocking && sent ? costs.send : 0);
    return true;
  }

  for (let moved = true; moved;) {
    moved = false;
    for (let rank = 0; rank < ranks; rank++)
      while (starts[rank].length < slots[rank].length && run(rank)) moved = true;
  }
  const makespan = Math.max(0, ...ends.map((each) => each.at(-1) ?? 0));
  const busy = slots.map((order) => order.reduce((sum, slot) => sum + duration(slot, costs, depth), 0));
  const idle = busy.map((time) => makespan - time);
  const bubble = makespan ? idle.reduce((a, b) => a + b, 0) / (ranks * makespan) : 0;
  return { starts, ends, makespan, busy, idle, bubble };
}

/** Of each rank, when what it keeps changes and how much it is from then on. */
function memoryOverTime(schedule, timeline, s) {
  const k = schedule.parts, kept = s.residual_w / k + s.boundary;
  const i = s.residual_i / k, stash = s.stash / k;
  const changes = [[i + kept, 0], [0, -i - kept], [stash, -i], [0, -kept - stash]];
  return schedule.slots.map((order, rank) => {
    let now = (s.parameters / k) * schedule.held[rank].length;
    const times = [0], amounts = [now];
    const step = (time, change) => {
      if (!change) return;
      now += change;
      times.push(time);
      amounts.push(now);
    };
    order.forEach((slot, index) => {
      let before = 0, after = 0;
      for (let at = 0; at < slot.length; at += 3) {
        before += changes[slot[at]][0];
        after += changes[slot[at]][1];
      }
      step(timeline.starts[rank][index], before);
      step(timeline.ends[rank][index], after);
    });
    return { times, amounts, peak: amounts.reduce((a, b) => Math.max(a, b)) };
  });
}

/** A send at the other end of what it may take: none if it takes any time, else a fiftieth of a forward. */
const otherSend = (s) => (s.send ? 0 : 0.02 * s.F);

function play(name, s) {
  const schedule = lookUp(name, s.ranks, s.microbatches);
  if (schedule.reason) return { name, reason: schedule.reason };
  const other = simulate(schedule, stageCosts(schedule, { ...s, send: otherSend(s) })).makespan;
  const timeline = simulate(schedule, stageCosts(schedule, s));
  const memory = memoryOverTime(schedule, timeline, s);
  const peak = Math.max(...memory.map((rank) => rank.peak));
  const pairs = schedule.slots.some((order) => order.some((slot) => slot.length > 3));
  return { name, schedule, ...timeline, other, memory, peak, pairs };
}

/* ---- state: what the controls say, and the address's fragment ---- */

const SLIDERS = [
  { id: "F", text: "F forward", group: "costs", min: 0.05, max: 3, step: 0.01 },
  { id: "I", text: "I backward for input", group: "costs", min: 0.05, max: 3, step: 0.01 },
  { id: "W", text: "W backward for weights", group: "costs", min: 0.05, max: 3, step: 0.01 },
  { id: "pair", text: "pair, of F + I + W", group: "costs", min: 0.4, max: 1.1, step: 0.01,
    show: (value, s) => `${Math.round(100 * value)} % = ${round(pairTime(s))}` },
  { id: "send", text: "send", group: "costs", min: 0, max: 1, step: 0.01 },
  { id: "head", text: "head, heavier last stage", group: "costs", min: 0, max: 1, step: 0.01,
    show: (value) => `+${Math.round(100 * value)} %` },
  { id: "residual_i", text: "kept for I", group: "sizes", min: 0, max: 4, step: 0.05 },
  { id: "residual_w", text: "kept for W", group: "sizes", min: 0, max: 4, step: 0.05 },
  { id: "stash", text: "handed from I to W", group: "sizes", min: 0, max: 4, step: 0.05 },
  { id: "boundary", text: "input of a stage", group: "sizes", min: 0, max: 2, step: 0.05 },
  { id: "parameters", text: "parameters, gradients, optimizer", group: "sizes", min: 0, max: 100, step: 0.5 },
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
    if (id === "schedule") s.schedule = Object.hasOwn(data.schedules, text) ? text : s.schedule;
    else if (id === "blocking") s.blocking = text === "true";
    else if (Number.isFinite(Number(text)) && Number(text) >= 0) s[id] = Number(text);
  }
  if (asked.has("FB") && Number(asked.get("FB")) >= 0) s.pair = Number(asked.get("FB")) / (s.F + s.I + s.W);
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
  update();
}

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
function reach(id, { min, max, step }) {
  const given = Math.max(data.start[id], ["F", "I", "W", "send"].includes(id) ? Math.max(data.start.F, data.start.I, data.start.W) : 0);
  if (given <= max && given >= 10 * step) return { min, max, step };
  if (!given) return { min, max, step };
  const unit = 10 ** Math.floor(Math.log10(given) - 1);
  return { min: min ? unit / 2 : 0, max: 3 * given, step: "any" };
}

function buildControls() {
  for (const name of Object.keys(data.schedules)) $("schedule").append(make("option", { value: name }, name));
  $("schedule").onchange = () => change({ schedule: $("schedule").value });
  for (const [id, axis] of [["ranks", ranksAxis], ["microbatches", () => microbatchesAxis(state.ranks)]]) {
    const [label, input] = slider(id, id, { min: 0, step: 1 });
    input.oninput = () => change({ [id]: axis()[Number(input.value)] });
    $("shape").append(label);
  }
  for (const { id, text, group, ...range } of SLIDERS) {
    const [label, input] = slider(id, text, reach(id, range));
    input.oninput = () => change({ [id]: Number(input.value) });
    $(group).append(label);
  }
  const box = make("input", { id: "blocking", type: "checkbox", onchange: () => change({ blocking: box.checked }) });
  $("costs").append(make("label", { className: "check" }, box, " a send keeps its sender too"));
  if (data.extra.length)
    $("costs").append(make("p", {}, "plus " + data.extra.map(([stage, ...more]) => `${more} (F, I, W) at stage ${stage}`).join(", ")));
  for (const [text, costs, how] of data.presets) {
    const onclick = () => { change(costs); $("how").textContent = how; };
    $("presets").append(make("button", { type: "button", title: how, onclick }, text));
  }
  $("presets").after(make("p", { id: "how" }));
}

function showControls() {
  $("schedule").value = state.schedule;
  for (const [id, axis] of [["ranks", ranksAxis()], ["microbatches", microbatchesAxis(state.ranks)]]) {
    Object.assign($(id), { max: axis.length - 1, value: axis.indexOf(state[id]) });
    $(id).setAttribute("aria-valuetext", state[id]);
    $(`${id}-value`).textContent = state[id];
  }
  for (const { id, show } of SLIDERS) {
    $(id).value = state[id];
    $(`${id}-value`).textContent = show ? show(state[id], state) : round(state[id]);
  }
  $("blocking").checked = state.blocking;
}

/* ---- figures, table, legend ---- */

/** Four digits; thousands of a large one as a letter. */
function round(value) {
  for (const [letter, unit] of [["T", 1e12], ["G", 1e9], ["M", 1e6]])
    if (value >= unit) return Number((value / unit).toPrecision(4)) + letter;
  return String(Number(value.toPrecision(4)));
}
const percent = (value) => `${(100 * value).toFixed(1)}\u00a0%`;
const countsMemory = () => state.residual_i === 1 && ["residual_w", "stash", "boundary", "parameters"].every((id) => !state[id]);

let played;

function update() {
  const all = Object.keys(data.schedules).map((name) => play(name, state));
  played = all.find(({ name }) => name === state.schedule);
  showControls();
  $("title").textContent = `${state.schedule}, ${state.ranks} ranks, ${state.microbatches} microbatches`;
  document.title = $("title").textContent;
  $("about").textContent = data.about[state.schedule] || "";
  $("refused").hidden = !played.reason;
  $("drawing").hidden = Boolean(played.reason);
  showFigures();
  showTable(all);
  if (played.reason) refuse();
  else { showLegend(); draw(); }
}

function showFigures() {
  const { reason, makespan, bubble, peak, busy, schedule } = played;
  const values = reason ? {} : { makespan, bubble, memory: peak, ideal: busy.reduce((a, b) => a + b, 0) / schedule.ranks };
  for (const id of ["makespan", "bubble", "memory", "ideal"]) {
    $(id).textContent = id in values ? (id === "bubble" ? percent : round)(values[id]) : "\u2013";
    if (id in values) $(id).dataset.value = values[id];
    else delete $(id).dataset.value;
  }
  $("memory-name").textContent = countsMemory() ? "peak activations" : "peak memory";
}

/** Says why there is no such schedule, and offers the nearest counts at which there is. */
function refuse() {
  const [text, button] = $("refused").children;
  text.textContent = played.reason;
  const served = data.points.filter((point) => typeof data.schedules[state.schedule][point] === "object");
  const away = ([r, m]) => 4 * Math.abs(r - state.ranks) + Math.abs(m - state.microbatches);
  const to = served.reduce((best, point) => (away(point) < away(best) ? point : best), served[0]);
  button.hidden = !to;
  if (!to) return;
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
    if (row.reason) line.append(make("td", { colSpan: 7, className: "reason" }, row.reason));
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
  const cells = [round(other), percent(bubble), round(peak), schedule.held[0].length, `${schedule.pipes.length}x`, pairs ? "yes" : ""];
  line.append(make("td", { className: "wide" }, bar), ...cells.map((text) => make("td", {}, text)));
}

function showLegend() {
  const { schedule, pairs } = played, shades = numShades(schedule);
  const used = new Set(schedule.slots.flat().flatMap((slot) => (slot.length > 3 ? [slot[0], slot[3]] : [slot[0]])));
  const swatch = (colour) => { const i = make("i"); i.style.background = colour; return i; };
  const entries = [F, B, I, W].filter((op) => used.has(op)).map((op) =>
    make("span", {}, ...Array.from({ length: shades }, (_, at) => swatch(colour(op, at, shades))), `${OPS[op]} ${data.names[op]}`));
  if (pairs) entries.push(make("span", {}, make("i", { className: "frame" }), "overlapped pair"));
  if (shades > 1) entries.push(make("span", {}, `shade: ${shadeNames(schedule).join(", ")}`));
  $("legend").replaceChildren(...entries);
}

/* ---- colours: plot.py's, shade by pipe and by how often the pipe has passed the ranks ---- */

const laps = (schedule) => Math.ceil(schedule.depth / schedule.ranks);
const numShades = (schedule) => schedule.pipes.length * laps(schedule);
const shade = (schedule, stage) =>
  Math.floor(stage / schedule.depth) * laps(schedule) + Math.floor((stage % schedule.depth) / schedule.ranks);

function shadeNames(schedule) {
  if (schedule.pipes.length > 1) return schedule.pipes.map((_, pipe) => `pipe ${pipe}`);
  const v = laps(schedule) === 2 && schedule.pipes[0][schedule.ranks] === schedule.ranks - 1;
  return v ? ["way there", "way back"] : Array.from({ length: laps(schedule) }, (_, lap) => `lap ${lap}`);
}

function colour(op, at, shades) {
  const [pale, deep] = data.colours[op], part = shades > 1 ? at / (shades - 1) : 0;
  const mixed = [1, 3, 5].map((i) => {
    const from = parseInt(pale.slice(i, i + 2), 16), to = parseInt(deep.slice(i, i + 2), 16);
    return Math.round(from + part * (to - from));
  });
  return `rgb(${mixed})`;
}

function inkOn(rgb) {
  const [r, g, b] = rgb.match(/\d+/g).map((channel) => (channel / 255) ** 2.2);
  return 0.21 * r + 0.72 * g + 0.07 * b < 0.25 ? "#fff" : "#1c1c22";
}

/* ---- the picture ---- */

const LEFT = 58, RIGHT = 8, BETWEEN = 18, PANEL = 110, AXIS = 22;
let zoomedFor = ""; // the counts for which the zoom was chosen
let followed = null; // [rank, slot index]

function geometry() {
  const width = $("scroller").clientWidth, zoom = Number($("zoom").value);
  const row = Math.max(18, Math.min(30, 420 / played.schedule.ranks));
  const rows = row * played.schedule.ranks;
  const scale = ((width - LEFT - RIGHT) * zoom) / (played.makespan || 1);
  const x = (time) => LEFT + time * scale - $("scroller").scrollLeft;
  return { width, zoom, row, rows, scale, x, height: rows + BETWEEN + PANEL + AXIS };
}

/** Once for each of the counts: so near that numbers in boxes can be read. */
function chooseZoom() {
  const counts = [state.schedule, state.ranks, state.microbatches].join();
  if (counts === zoomedFor || !$("scroller").clientWidth) return;
  zoomedFor = counts;
  const lengths = played.ends.flatMap((row, rank) => row.map((end, at) => end - played.starts[rank][at])).filter(Boolean);
  const short = lengths.sort((a, b) => a - b)[Math.floor(lengths.length / 5)] || played.makespan || 1;
  const wanted = (9 * played.makespan) / (short * ($("scroller").clientWidth - LEFT - RIGHT));
  $("zoom").value = Math.max(1, Math.min(Number($("zoom").max), wanted));
}

function draw() {
  if (!played || played.reason) return;
  chooseZoom();
  const canvas = $("canvas"), dots = window.devicePixelRatio || 1;
  let g = geometry();
  $("spacer").style.width = `${LEFT + RIGHT + (g.width - LEFT - RIGHT) * g.zoom}px`;
  g = geometry(); // the scroll position may have been cut off
  Object.assign(canvas, { width: g.width * dots, height: g.height * dots });
  Object.assign(canvas.style, { width: `${g.width}px`, height: `${g.height}px` });
  canvas.setAttribute("aria-label", `${document.title}: makespan ${round(played.makespan)}, bubble ${percent(played.bubble)}, peak memory ${round(played.peak)}`);
  const style = getComputedStyle(document.documentElement);
  const ink = Object.fromEntries(["ink", "faint", "line", "idle", "frame", "card"].map((id) => [id, style.getPropertyValue(`--${id}`).trim()]));
  const pen = canvas.getContext("2d");
  pen.scale(dots, dots);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  drawLabels(pen, g, ink);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT - 1, 0, g.width - LEFT - RIGHT + 2, g.height);
  pen.clip();
  played.schedule.slots.forEach((order, rank) => drawRank(pen, g, ink, order, rank));
  drawMemory(pen, g, ink);
  pen.restore();
}

function drawLabels(pen, g, ink) {
  pen.textAlign = "right";
  played.schedule.slots.forEach((_, rank) => {
    pen.fillStyle = ink.idle;
    pen.fillRect(LEFT, rank * g.row + 1, g.width - LEFT - RIGHT, g.row - 2);
    pen.fillStyle = ink.ink;
    pen.fillText(`rank ${rank}`, LEFT - 8, (rank + 0.5) * g.row);
  });
}

/** What the pointer follows: a rank's slot's microbatches, as "pipe,microbatch". */
function trail() {
  if (!followed) return null;
  const slot = played.schedule.slots[followed[0]]?.[followed[1]];
  return slot && new Set(actionsOf(slot).map(([, stage, m]) => `${Math.floor(stage / played.schedule.depth)},${m}`));
}

const actionsOf = (slot) => (slot.length > 3 ? [slot.slice(0, 3), slot.slice(3)] : [slot]);

function drawRank(pen, g, ink, order, rank) {
  const { schedule, starts, ends } = played, shades = numShades(schedule), seen = trail();
  const top = rank * g.row + 1, height = g.row - 2;
  order.forEach((slot, index) => {
    const left = g.x(starts[rank][index]), right = g.x(ends[rank][index]);
    if (right < LEFT || left > g.width) return;
    const parts = actionsOf(slot);
    parts.forEach(([op, stage, microbatch], part) => {
      const fill = colour(op, shade(schedule, stage), shades), high = height / parts.length;
      const on = !seen || seen.has(`${Math.floor(stage / schedule.depth)},${microbatch}`);
      pen.globalAlpha = on ? 1 : 0.22;
      pen.fillStyle = fill;
      const gap = Math.min(1, (right - left) / 8);
      pen.fillRect(left, top + part * high, right - left - gap, high);
      writeNumber(pen, String(microbatch), (left + right) / 2, top + (part + 0.5) * high, right - left, high, fill);
    });
    pen.globalAlpha = 1;
    if (parts.length > 1) {
      pen.strokeStyle = ink.frame;
      pen.lineWidth = Math.min(1.3, (right - left) / 8);
      pen.strokeRect(left + 0.5, top + 0.5, right - left - 1, height - 1);
    }
  });
}

function writeNumber(pen, text, x, y, width, height, fill) {
  const size = Math.min(12, height * 0.85, (width - 1) / (0.6 * Math.max(2, text.length)));
  if (size < 5) return;
  pen.font = `${size}px system-ui, sans-serif`;
  pen.textAlign = "center";
  pen.fillStyle = inkOn(fill);
  pen.fillText(text, x, y + size * 0.06);
}

function drawMemory(pen, g, ink) {
  const { memory, peak, makespan, schedule } = played;
  const bottom = g.rows + BETWEEN + PANEL, most = 1.12 * peak || 1;
  const y = (amount) => bottom - (PANEL * amount) / most;
  drawAxes(pen, g, ink, bottom, y);
  memory.forEach(({ times, amounts }, rank) => {
    pen.beginPath();
    pen.moveTo(g.x(0), y(amounts[0]));
    times.forEach((time, i) => {
      if (i) pen.lineTo(g.x(time), y(amounts[i - 1]));
      pen.lineTo(g.x(time), y(amounts[i]));
    });
    pen.lineTo(g.x(makespan), y(amounts.at(-1)));
    const chosen = followed && followed[0] === rank;
    pen.strokeStyle = `hsl(${275 - (205 * rank) / Math.max(1, schedule.ranks - 1)} 55% 50%)`;
    pen.globalAlpha = !followed || chosen ? 1 : 0.25;
    pen.lineWidth = chosen ? 2.2 : 1.2;
    pen.stroke();
  });
  pen.globalAlpha = 1;
}

function drawAxes(pen, g, ink, bottom, y) {
  const { peak, makespan } = played;
  Object.assign(pen, { fillStyle: ink.faint, strokeStyle: ink.line, lineWidth: 1, font: "11px system-ui, sans-serif" });
  for (const amount of [0, peak]) {
    pen.beginPath();
    pen.moveTo(LEFT, y(amount));
    pen.lineTo(g.width - RIGHT, y(amount));
    pen.stroke();
  }
  const step = niceStep((80 / g.scale) || 1);
  pen.textAlign = "center";
  for (let time = 0; time <= makespan * 1.0001; time += step)
    if (g.x(time) > LEFT - 1) pen.fillText(round(time), g.x(time) + (time ? 0 : 4), bottom + 12);
  pen.restore();
  pen.textAlign = "right";
  pen.fillStyle = ink.faint;
  pen.fillText(round(peak), LEFT - 8, y(peak));
  pen.fillText("0", LEFT - 8, y(0));
  pen.fillText(countsMemory() ? "activ." : "memory", LEFT - 8, (y(0) + y(peak)) / 2);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT - 1, 0, g.width - LEFT - RIGHT + 2, g.height);
  pen.clip();
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}

/* ---- following a microbatch ---- */

function follow(place) {
  const same = JSON.stringify(place) === JSON.stringify(followed);
  if (same) return;
  followed = place;
  const slot = place && played.schedule.slots[place[0]][place[1]];
  if (slot) {
    const [rank, index] = place, { starts, ends, memory } = played;
    const name = actionsOf(slot).map(([op, stage, m]) => `${stage}${OPS[op]}${m}`).join("+");
    const kept = memory[rank].amounts[memory[rank].times.findLastIndex((time) => time <= starts[rank][index])];
    $("readout").textContent = `rank ${rank}: ${name}, from ${round(starts[rank][index])} to ${round(ends[rank][index])}; the rank keeps ${round(kept)}, idles ${round(played.idle[rank])} in all`;
  }
  draw();
}

function slotAt(event) {
  const g = geometry(), box = $("canvas").getBoundingClientRect();
  const rank = Math.floor((event.clientY - box.top) / g.row), x = event.clientX - box.left;
  if (!(rank in played.schedule.slots)) return null;
  const index = played.ends[rank].findIndex((end, i) => g.x(end) > x && g.x(played.starts[rank][i]) <= x);
  return index < 0 ? null : [rank, index];
}

function walk(event) {
  const [rank, index] = followed || [0, -1], { slots } = played.schedule;
  const to = { ArrowRight: [rank, index + 1], ArrowLeft: [rank, index - 1], ArrowDown: [rank + 1, index], ArrowUp: [rank - 1, index] }[event.key];
  if (event.key === "Escape") follow(null);
  if (!to) return;
  event.preventDefault();
  const on = Math.max(0, Math.min(slots.length - 1, to[0]));
  follow([on, Math.max(0, Math.min(slots[on].length - 1, to[1]))]);
}

function listen() {
  $("canvas").onmousemove = (event) => follow(slotAt(event));
  $("canvas").onmouseleave = () => follow(null);
  $("canvas").onblur = () => follow(null);
  $("canvas").onkeydown = walk;
  $("scroller").onscroll = draw;
  $("zoom").oninput = draw;
  $("theme").onclick = () => {
    const root = document.documentElement;
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    draw();
  };
  document.body.ondragover = (event) => event.preventDefault();
  document.body.ondrop = drop;
  $("save-json").onclick = () => save(`${played.name}.json`, new Blob([toJson()], { type: "application/json" }));
  $("save-png").onclick = () => $("canvas").toBlob((blob) => save(`${played.name}.png`, blob));
  window.onresize = draw;
  window.onhashchange = () => { state = fromFragment(location.hash.slice(1)); update(); };
}

/* ---- files in and out ---- */

/** A schedule in the JSON that `dualpipe show --json` writes, as the page's own; throws what is wrong. */
function readSchedule(text) {
  const { name, pipes, orders, num_microbatches } = JSON.parse(text);
  if (typeof name !== "string" || !Array.isArray(pipes) || !Array.isArray(orders) || !num_microbatches)
    throw new Error("no schedule; give a file that dualpipe show --json wrote");
  const rankOf = pipes.flat(), depth = pipes[0].length;
  const slots = orders.map((order) => order.map((slot) => slot.split("+").flatMap((text) => {
    const [, stage, op, microbatch] = text.match(/^(\d+)([FBIW])(\d+)$/) || [];
    if (op === undefined || !(Number(stage) in rankOf)) throw new Error(`not an action: ${text}`);
    return [OPS.indexOf(op), Number(stage), Number(microbatch)];
  })));
  const held = orders.map((_, rank) => [...rankOf.keys()].filter((stage) => rankOf[stage] === rank));
  const count = num_microbatches / pipes.length, ranks = orders.length;
  return { name, microbatches: num_microbatches, pipes, depth, rankOf, held, slots, count, ranks, parts: depth / ranks };
}

function takeIn(text) {
  const schedule = readSchedule(text), { ranks, microbatches } = schedule;
  const name = Object.hasOwn(data.schedules, schedule.name) ? `${schedule.name}, as given` : schedule.name;
  if (!Object.hasOwn(data.schedules, name)) $("schedule").append(make("option", { value: name }, name));
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

function toJson() {
  const { schedule, name } = played;
  const orders = schedule.slots.map((order) => order.map((slot) =>
    actionsOf(slot).map(([op, stage, m]) => `${stage}${OPS[op]}${m}`).join("+")));
  return JSON.stringify({ name, num_microbatches: schedule.count * schedule.pipes.length, pipes: schedule.pipes, orders });
}

async function main() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  data = await unpack($("payload").textContent);
  state = fromFragment(location.hash.slice(1));
  buildControls();
  listen();
  update();
  document.body.dataset.ready = "true";
}

main().catch((error) => {
  document.body.dataset.error = error;
  $("about").textContent = `This page could not start: ${error}`;
});

"use strict";
/* Draws what player.js played: the grid of slots and the bands of memory, on the page's canvases or to be saved. */

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
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = rgb.match(/\d+/g).map((channel) => linear(channel / 255));
  return (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05) ** 2 < 1.05 * 0.05 ? "#fff" : "#1c1c22";
}

/* ---- the picture ---- */

const LEFT = 58, TOP = 16, BETWEEN = 18, AXIS = 22;
let zoomedFor = ""; // the counts for which the zoom was chosen

const sides = () => (second && second !== played ? [["canvas", played], ["second", second]] : [["canvas", played]]);

/** Where things stand on a canvas; ``whole`` is the picture at its full width, not the part that is scrolled to. */
function geometry(shown, whole = false) {
  const room = $("scroller").clientWidth, zoom = Number($("zoom").value), right = room < 500 ? 8 : 96, { ranks } = shown.schedule;
  const row = Math.max(18, Math.min(30, 420 / ranks)), band = Math.max(9, Math.min(26, 150 / ranks));
  const longest = Math.max(...sides().map(([, each]) => each.makespan)) || 1;
  const scale = ((room - LEFT - right) * zoom) / longest, width = whole ? LEFT + right + scale * longest : room;
  const x = (time) => LEFT + time * scale - (whole ? 0 : $("scroller").scrollLeft);
  const rows = TOP + row * ranks;
  return { width, zoom, row, band, rows, right, scale, x, height: rows + BETWEEN + band * ranks + AXIS };
}

/** Once for each of the counts: so near that numbers in boxes can be read. */
function chooseZoom() {
  const counts = [state.schedule, state.ranks, state.microbatches].join(), room = $("scroller").clientWidth - LEFT - 96;
  if (counts === zoomedFor || room < 0) return;
  zoomedFor = counts;
  const lengths = played.ends.flatMap((row, rank) => row.map((end, at) => end - played.starts[rank][at])).filter(Boolean);
  const short = lengths.sort((a, b) => a - b)[Math.floor(lengths.length / 5)] || played.makespan || 1;
  const wanted = (9 * played.makespan) / (short * room);
  $("zoom").value = Math.max(1, Math.min(Number($("zoom").max), wanted));
}

function draw() {
  if (!played || played.reason) return;
  chooseZoom();
  const first = geometry(played);
  $("spacer").style.width = `${LEFT + first.right + (first.width - LEFT - first.right) * first.zoom}px`;
  $("second").hidden = $("second-name").hidden = sides().length < 2;
  $("second-name").textContent = state.beside;
  $("chain").setAttribute("aria-pressed", Boolean(chained));
  for (const [id, shown] of sides()) drawOn($(id), shown, geometry(shown)); // the scroll position may have been cut off
}

function drawOn(canvas, shown, g) {
  const dots = window.devicePixelRatio || 1;
  Object.assign(canvas, { width: g.width * dots, height: g.height * dots });
  Object.assign(canvas.style, { width: `${g.width}px`, height: `${g.height}px` });
  const { name, makespan, bubble, peak } = shown;
  canvas.setAttribute("aria-label", `${name}, ${document.title}: makespan ${took(makespan)}, bubble ${percent(bubble)}, peak memory ${kept(peak)}`);
  const style = getComputedStyle(document.documentElement);
  const ids = ["ink", "faint", "line", "idle", "frame", "card", "accent", "chain", "fill"];
  const ink = Object.fromEntries(ids.map((id) => [id, style.getPropertyValue(`--${id}`).trim()]));
  const pen = canvas.getContext("2d");
  pen.scale(dots, dots);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  drawLabels(pen, g, ink, shown);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT - 1, 0, g.width - LEFT - g.right + 2, g.height);
  pen.clip();
  drawIdle(pen, g, ink, shown);
  shown.schedule.slots.forEach((order, rank) => drawRank(pen, g, ink, shown, order, rank));
  drawSends(pen, g, ink, shown);
  drawBound(pen, g, ink, shown);
  drawMemory(pen, g, ink, shown);
  drawTimes(pen, g, ink, shown);
  drawChain(pen, g, ink, shown);
  pen.restore();
}

function drawLabels(pen, g, ink, { schedule, idle, memory, peak }) {
  const beside = g.width - g.right + 6;
  schedule.slots.forEach((_, rank) => {
    const row = TOP + (rank + 0.5) * g.row, band = g.rows + BETWEEN + (rank + 0.6) * g.band;
    pen.textAlign = "right";
    pen.fillStyle = ink.ink;
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(`rank ${rank}`, LEFT - 8, row);
    pen.font = `${Math.min(11, g.band - 1)}px system-ui, sans-serif`;
    pen.fillText(`rank ${rank}`, LEFT - 8, band);
    if (g.right < 50) return;
    pen.textAlign = "left";
    pen.fillStyle = ink.faint;
    pen.fillText(`idle ${took(Number(idle[rank].toFixed(9)))}`, beside, row);
    if (memory[rank].peak === peak) pen.fillStyle = ink.ink;
    pen.fillText(`peak ${kept(memory[rank].peak)}`, beside, band);
  });
  pen.textAlign = "left";
  pen.fillStyle = ink.faint;
  pen.font = "11px system-ui, sans-serif";
  pen.fillText(countsMemory() ? "live activations" : "memory", LEFT, g.rows + BETWEEN / 2);
}

function drawIdle(pen, g, ink, { schedule, makespan }) {
  const left = g.x(0), right = g.x(makespan);
  schedule.slots.forEach((_, rank) => {
    const top = TOP + rank * g.row + 1, high = g.row - 2;
    pen.fillStyle = ink.idle;
    pen.fillRect(left, top, right - left, high);
    pen.save();
    pen.beginPath();
    pen.rect(left, top, right - left, high);
    pen.clip();
    pen.strokeStyle = ink.card;
    pen.lineWidth = 1;
    pen.beginPath();
    for (let at = Math.max(left - high, LEFT - high) - (left % 6); at < Math.min(right, g.width); at += 6) {
      pen.moveTo(at, top + high);
      pen.lineTo(at + high, top);
    }
    pen.stroke();
    pen.restore();
  });
}

/** What the pointer follows: a rank's slot's microbatches, as "pipe,microbatch". */
function trail(shown) {
  if (!followed || followed.of !== shown || followed.links) return null;
  const slot = shown.schedule.slots[followed.rank]?.[followed.index];
  return slot && new Set(actionsOf(slot).map(([, stage, m]) => `${Math.floor(stage / shown.schedule.depth)},${m}`));
}

function drawRank(pen, g, ink, shown, order, rank) {
  const { schedule, starts, ends } = shown, shades = numShades(schedule), seen = trail(shown);
  const top = TOP + rank * g.row + 1, height = g.row - 2;
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

/** A thin line for each transfer that takes time, from what made it to where it has arrived. */
function drawSends(pen, g, ink, { schedule, costs, ends }) {
  pen.strokeStyle = ink.ink;
  pen.lineWidth = 0.6;
  pen.globalAlpha = 0.55;
  pen.beginPath();
  schedule.slots.forEach((order, rank) => order.forEach((slot, index) => {
    const parts = actionsOf(slot), left = g.x(ends[rank][index]);
    if (left > g.width) return;
    parts.forEach((action, part) => {
      const to = sentTo(schedule, action), delay = costs.transfer(rank, to), right = left + delay * g.scale;
      if (!delay || right < LEFT) return;
      pen.moveTo(left, TOP + (rank + (part + 0.5) / parts.length) * g.row);
      pen.lineTo(right, TOP + (to + 0.5) * g.row);
    });
  }));
  pen.stroke();
  pen.globalAlpha = 1;
}

function drawBound(pen, g, ink, shown) {
  if (!(shown.bound < shown.makespan * (1 - HAIR)) || !shown.bound) return;
  Object.assign(pen, { strokeStyle: ink.chain, fillStyle: ink.chain, lineWidth: 1.2, font: "11px system-ui, sans-serif", textAlign: "right" });
  const x = g.x(shown.bound);
  pen.setLineDash([4, 3]);
  pen.beginPath();
  pen.moveTo(x, TOP - 4);
  pen.lineTo(x, g.rows);
  pen.stroke();
  pen.setLineDash([]);
  pen.fillText(`proven bound ${took(shown.bound)}`, x - 3, TOP / 2);
}

/** The slots of a chain framed, and each joined to the one that waits for it. */
function drawChain(pen, g, ink, shown) {
  const links = followed?.of === shown && followed.links ? followed.links : shown === played ? chained : null;
  if (!links?.length) return;
  const { starts, ends } = shown, middle = (rank) => TOP + (rank + 0.5) * g.row;
  Object.assign(pen, { strokeStyle: ink.chain, lineWidth: 2 });
  pen.beginPath();
  links.forEach(([rank, index], at) => {
    const left = g.x(starts[rank][index]), right = g.x(ends[rank][index]);
    pen.rect(left, TOP + rank * g.row + 1, right - left, g.row - 2);
    if (!at) return;
    const [later, place] = links[at - 1];
    pen.moveTo(right, middle(rank));
    pen.lineTo(g.x(starts[later][place]), middle(later));
  });
  pen.stroke();
}

/** A band for each rank, all to one scale. */
function drawMemory(pen, g, ink, { memory, peak, makespan }) {
  memory.forEach(({ times, amounts }, rank) => {
    const base = g.rows + BETWEEN + (rank + 1) * g.band - 1, y = (amount) => base - ((g.band - 2) * amount) / (peak || 1);
    pen.beginPath();
    pen.moveTo(g.x(0), base);
    times.forEach((time, i) => {
      pen.lineTo(g.x(time), y(amounts[Math.max(0, i - 1)]));
      pen.lineTo(g.x(time), y(amounts[i]));
    });
    pen.lineTo(g.x(makespan), y(amounts.at(-1)));
    pen.lineTo(g.x(makespan), base);
    pen.fillStyle = ink.fill;
    pen.fill();
    pen.strokeStyle = ink.faint;
    pen.lineWidth = 0.7;
    pen.stroke();
  });
}

function drawTimes(pen, g, ink, { makespan }) {
  const step = niceStep(80 / g.scale || 1), bottom = g.height - AXIS / 2;
  Object.assign(pen, { fillStyle: ink.faint, font: "11px system-ui, sans-serif", textAlign: "center" });
  for (let time = 0; time <= makespan * 1.0001; time += step)
    if (g.x(time) > LEFT - 1) pen.fillText(time ? round(time) : took(0), g.x(time) + (time ? 0 : 12), bottom);
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}

/** The whole step at the zoom that is chosen, not only the part that is scrolled to; with what it is written below. */
function picture() {
  const parts = sides().map(([, shown]) => {
    const canvas = make("canvas");
    drawOn(canvas, shown, geometry(shown, true));
    return [canvas, `${shown.name}, ${state.ranks} ranks, ${state.microbatches} microbatches: makespan ${took(shown.makespan)}, bubble ${percent(shown.bubble)}`];
  });
  const head = 24 * (window.devicePixelRatio || 1), width = Math.max(...parts.map(([canvas]) => canvas.width));
  const all = make("canvas", { width, height: parts.reduce((sum, [canvas]) => sum + canvas.height + head, 0) }), pen = all.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  pen.fillStyle = style.getPropertyValue("--card");
  pen.fillRect(0, 0, all.width, all.height);
  let top = 0;
  for (const [canvas, title] of parts) {
    Object.assign(pen, { fillStyle: style.getPropertyValue("--ink"), font: `600 ${head * 0.6}px system-ui, sans-serif`, textBaseline: "middle" });
    pen.fillText(title, 8, top + head / 2);
    pen.drawImage(canvas, 0, top + head);
    top += canvas.height + head;
  }
  return all;
}

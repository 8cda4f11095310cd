"use strict";
/* Plays schedules that Python wrote against costs that are chosen here, which is why the clock, the bound and the chains
   of waiting of simulate.py, bounds.py and blame.py stand here a second time; tests/schedule/formats/test_page.py holds
   the two together. It makes no order: see page.py for what the payload holds. Nothing here knows the page. */

const OPS = ["F", "B", "I", "W"];
const F = 0, B = 1, I = 2, W = 3;
/** Times that differ by less than this share of the step are the same. */
const HAIR = 1e-9;
let data;

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
  const held = heldBy(pipes, orders.length);
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
  return built(pipes, slots);
}

const heldBy = (pipes, ranks) => {
  const rankOf = pipes.flat();
  return Array.from({ length: ranks }, (_, rank) => [...rankOf.keys()].filter((stage) => rankOf[stage] === rank));
};

/** A schedule as the rest reads it: ``waits``, for each slot those whose values it reads, as [rank, index] (undefined
    if nobody makes one); ``ran``, an order in which the slots can run. */
function built(pipes, slots) {
  const ranks = slots.length, depth = pipes[0].length, rankOf = pipes.flat();
  const count = 1 + slots.flat(1).reduce((most, slot) => Math.max(most, slot[2], slot[5] || 0), 0);
  const schedule = { pipes, depth, rankOf, held: heldBy(pipes, ranks), slots, count, ranks, parts: depth / ranks };
  const makers = new Map();
  const each = (visit) => slots.map((order, rank) => order.map((slot, index) => visit(actionsOf(slot), rank, index)));
  each((actions, rank, index) => {
    for (const [op, stage, m] of actions) if (op !== W) makers.set(value(schedule, op === F, stage, m), [rank, index]);
  });
  schedule.waits = each((actions) => actions.flatMap((action) => needs(schedule, ...action)).map((read) => makers.get(read)));
  return Object.assign(schedule, { ran: runOrder(schedule) });
}

const actionsOf = (slot) => (slot.length > 3 ? [slot.slice(0, 3), slot.slice(3)] : [slot]);
const spelt = (slot) => actionsOf(slot).map(([op, stage, m]) => `${stage}${OPS[op]}${m}`).join("+");

/** The number of what a stage hands on: y of a forward, dx of a backward. */
const value = ({ count }, isY, stage, microbatch) => 2 * (stage * count + microbatch) + (isY ? 0 : 1);

/** What an action reads. */
function needs(schedule, op, stage, microbatch) {
  const { depth } = schedule, at = stage % depth;
  const y = (s) => value(schedule, true, s, microbatch), dx = (s) => value(schedule, false, s, microbatch);
  if (op === F) return at === 0 ? [] : [y(stage - 1)];
  if (op === W) return [dx(stage)];
  return at === depth - 1 ? [y(stage)] : [y(stage), dx(stage + 1)];
}

function runOrder({ slots, waits }) {
  const next = slots.map(() => 0), ran = [];
  const can = (rank) => next[rank] < slots[rank].length && waits[rank][next[rank]].every((place) => place && place[1] < next[place[0]]);
  for (let before = -1; ran.length > before;) {
    before = ran.length;
    for (const rank of slots.keys()) while (can(rank)) ran.push([rank, next[rank]++]);
  }
  return ran;
}

/* ---- costs ---- */

const NOTHING = [0, 0, 0, 0];
const pairTime = (s) => s.pair * (s.F + s.I + s.W);

/** Costs of one stage: a rank's share over the stages that it makes; sends and extras as they are. */
function stageCosts(schedule, s) {
  const k = schedule.parts, more = extras(schedule, data.extra);
  if (s.head) {
    const had = more.get(schedule.depth - 1) || NOTHING, [f, i, w] = [s.F, s.I, s.W].map((cost) => s.head * cost);
    more.set(schedule.depth - 1, [had[F] + f, had[B] + i + w, had[I] + i, had[W] + w]);
  }
  const alone = [s.F, s.I + s.W, s.I, s.W].map((cost) => cost / k), pair = pairTime(s) / k;
  const transfer = (here, there) =>
    here === there ? 0 : Math.floor(here / s.node) === Math.floor(there / s.node) ? s.inside : s.send;
  const less = [...more].find(([, [f, b, i, w]]) => Math.min(alone[F] + f, alone[I] + i, alone[W] + w, pair + f + b) < 0);
  const reason = less && `Extras take more away than stage ${less[0]} has, of ${schedule.depth}.`;
  return { alone, pair, transfer, blocking: s.blocking, more, reason };
}

/** Of each stage of the model that has any, what F, B, I, W cost more. */
function extras({ depth }, given) {
  const more = new Map();
  for (const [stage, f, i, w] of given) {
    if (stage < -depth || stage >= depth) continue;
    const at = (stage + depth) % depth, had = more.get(at) || NOTHING;
    more.set(at, [had[F] + f, had[B] + i + w, had[I] + i, had[W] + w]);
  }
  return more;
}

function duration(slot, costs, depth) {
  let time = slot.length > 3 ? costs.pair : costs.alone[slot[0]];
  for (let at = 0; at < slot.length; at += 3) {
    const more = costs.more.get(slot[at + 1] % depth);
    if (more) time += more[slot[at]];
  }
  return time;
}

/* ---- the simulation ---- */

function simulate(schedule, costs, vary = (time) => time) {
  const { slots, waits, depth, ran } = schedule;
  const starts = slots.map(() => []), ends = slots.map(() => []), free = slots.map(() => 0);
  for (const [rank, index] of ran) {
    const slot = slots[rank][index];
    let start = free[rank];
    for (const [maker, at] of waits[rank][index]) start = Math.max(start, ends[maker][at] + costs.transfer(maker, rank));
    const end = start + vary(duration(slot, costs, depth));
    starts[rank].push(start);
    ends[rank].push(end);
    free[rank] = end + sendHold(schedule, slot, costs);
  }
  const makespan = Math.max(0, ...ends.map((each) => each.at(-1) ?? 0));
  return { starts, ends, makespan };
}

/** The rank that reads what an action makes: its own, if nobody else does. */
function sentTo({ depth, rankOf }, [op, stage]) {
  const at = stage % depth;
  return op === W || at === (op === F ? depth - 1 : 0) ? rankOf[stage] : rankOf[op === F ? stage + 1 : stage - 1];
}

/** How long a slot's sends keep its rank: where they block, the longest. */
const sendHold = (schedule, slot, costs) =>
  !costs.blocking ? 0 : Math.max(...actionsOf(slot).map((action) => costs.transfer(schedule.rankOf[action[1]], sentTo(schedule, action))));

/** Numbers that are drawn evenly between 0 and 1, the same at each call (mulberry32). */
function dice(seed) {
  return () => {
    let t = (seed = (seed + 0x6d2b79f5) | 0);
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** The median and the 95th percentile of the makespan where each slot's time varies: log-normal, of mean 1. */
function jittered(schedule, costs, jitter, runs) {
  const spread = Math.sqrt(Math.log1p(jitter ** 2)), throwDice = dice(1);
  const normal = () => Math.sqrt(-2 * Math.log(1 - throwDice())) * Math.cos(2 * Math.PI * throwDice());
  const vary = (time) => time * Math.exp(spread * normal() - spread ** 2 / 2);
  const found = Array.from({ length: runs }, () => simulate(schedule, costs, vary).makespan).sort((a, b) => a - b);
  const quantile = (part) => {
    const at = part * (runs - 1), low = Math.floor(at);
    return found[low] + (at - low) * ((found[low + 1] ?? found[low]) - found[low]);
  };
  return [quantile(0.5), quantile(0.95)];
}

/** Of each rank, when what it keeps changes and how much it is from then on. */
function memoryOverTime(schedule, timeline, s) {
  const { depth, parts: k } = schedule, kept = s.residual_w / k + s.boundary;
  const i = s.residual_i / k, stash = s.stash / k;
  const changes = [[i + kept, 0], [0, -i - kept], [stash, -i], [0, -kept - stash]];
  const extra = (at) => data.kept.reduce((sum, [stage, more]) => sum + (stage === at || stage === at - depth ? more : 0), 0);
  return schedule.slots.map((order, rank) => {
    let now = s.fixed + schedule.held[rank].reduce((sum, stage) => sum + s.parameters / k + extra(stage % depth), 0);
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

/* ---- the bound: bounds.py without a limit of memory ---- */

function reaches({ pipes, depth, held }, costs) {
  const more = (d) => costs.more.get(d) || NOTHING, { alone, pair } = costs;
  return pipes.flatMap((ranks) => {
    const least = (rank, op) => Math.min(0, ...held[rank].map((stage) => more(stage % depth)[op]));
    const f = ranks.map((rank, d) => Math.min(alone[F], pair + least(rank, B)) + more(d)[F]);
    const i = ranks.map((rank, d) => Math.min(alone[I], pair + least(rank, F) + Math.min(0, more(d)[W])) + more(d)[I]);
    const b = ranks.map((rank, d) => Math.min(alone[B], pair + least(rank, F)) + more(d)[B]);
    const hop = ranks.map((rank, d) => (d + 1 < depth ? costs.transfer(rank, ranks[d + 1]) : 0));
    const found = [];
    let head = 0, tail = 0;
    for (let d = 0; d < depth; d++) {
      found.push({ head, tail, turn: 0, f: f[d], i: i[d], b: b[d] });
      head += f[d] + hop[d];
      tail += hop[d] + (d ? i[d] : b[0]);
    }
    let turn = 0;
    for (let d = depth - 1; d >= 0; d--) found[d].turn = turn += f[d] + i[d] + 2 * hop[d];
    for (const r of found) Object.assign(r, { early: r.head + r.turn - r.i, rest: r.turn - r.f - r.i + Math.max(r.b, r.i + r.tail) });
    return found;
  });
}

function bound(schedule, costs) {
  const { depth, held, count } = schedule, around = reaches(schedule, costs), { alone } = costs;
  const gain = Math.max(0, alone[F] + alone[B] - costs.pair);
  const chain = Math.max(...around.filter((reach) => !reach.head).map((reach) => reach.f + reach.rest));
  return held.reduce((best, stages) => {
    const least = (name) => Math.min(...stages.map((stage) => around[stage][name]));
    const most = (op) => {
      const each = stages.flatMap((stage) => Array(count).fill(alone[op] + (costs.more.get(stage % depth) || NOTHING)[op]));
      const sums = [0];
      for (const cost of each.sort((a, b) => b - a)) sums.push(sums.at(-1) + cost);
      return sums;
    };
    const mostF = most(F), mostB = most(B), mostW = most(W), all = mostF.length - 1;
    const ofPipes = schedule.pipes.map((_, pipe) => stages.filter((stage) => Math.floor(stage / depth) === pipe).length);
    const lonely = Math.min(...ofPipes.filter(Boolean));
    let meeting = Infinity;
    for (let pairs = 0; pairs <= all - lonely; pairs++) {
      const left = all - pairs;
      const before = Math.max(least("head"), least("early") - mostF[left]);
      const after = Math.max(0, least("rest") - mostB[left], least("tail") - mostW[left]);
      meeting = Math.min(meeting, mostF[all] + mostB[all] - pairs * gain + before + after);
    }
    // Or every forward is before every backward: then there are no pairs, and the last forward's backward is awaited.
    const before = Math.max(least("head"), least("early") - mostF[all]), after = Math.max(0, least("tail") - mostW[all]);
    const drained = Math.max(mostF[all] + mostB[all] + before + after, least("head") + mostF[all] + least("rest"));
    return Math.max(best, Math.min(meeting, drained));
  }, chain);
}

/* ---- blame: what a slot waited for, back to one that waited for nothing ---- */

function chainFrom({ schedule, costs, starts, ends, makespan }, rank, index, until = -Infinity) {
  const hair = HAIR * makespan, links = [];
  for (let place = [rank, index]; place;) {
    const [r, i] = place, start = starts[r][i];
    links.push(place);
    place = null;
    if (!(start > 0) || (links.length > 1 && start <= until + hair)) break;
    const waits = schedule.waits[r][i].filter(([maker]) => maker !== r).map((maker) => [maker, costs.transfer(maker[0], r)]);
    if (i) waits.push([[r, i - 1], sendHold(schedule, schedule.slots[r][i - 1], costs)]);
    for (const [[maker, at], delay] of waits)
      if (ends[maker][at] + delay >= start - hair) { place = [maker, at]; break; }
  }
  return links;
}

function criticalPath(played) {
  const lasts = played.ends.map((ends) => ends.at(-1) ?? 0), rank = lasts.indexOf(Math.max(...lasts));
  return chainFrom(played, rank, played.ends[rank].length - 1);
}

/** What a rank that idles at a time waits for; empty if it works, or is through. */
function whyIdle(played, rank, time) {
  const next = played.starts[rank].findIndex((start) => start > time), before = played.ends[rank][next - 1] ?? 0;
  return next < 0 || before > time ? [] : chainFrom(played, rank, next, before);
}

/* ---- all of it ---- */

const paysForSends = (s) => Boolean(s.send || (s.node > 1 && s.inside));
/** A send at the other end of what it may take: none if it takes any time, else a fiftieth of a forward. */
const otherSend = (s) => (paysForSends(s) ? 0 : 0.02 * s.F);

function play(name, s) {
  const schedule = lookUp(name, s.ranks, s.microbatches);
  if (schedule.reason) return { name, reason: schedule.reason };
  const costs = stageCosts(schedule, s), send = otherSend(s);
  if (costs.reason) return { name, reason: costs.reason };
  const other = simulate(schedule, stageCosts(schedule, { ...s, send, inside: send })).makespan;
  const timeline = simulate(schedule, costs), { makespan } = timeline;
  const busy = schedule.slots.map((order) => order.reduce((sum, slot) => sum + duration(slot, costs, schedule.depth), 0));
  const idle = busy.map((time) => makespan - time);
  const bubble = makespan ? idle.reduce((a, b) => a + b, 0) / (schedule.ranks * makespan) : 0;
  const memory = memoryOverTime(schedule, timeline, s);
  const peak = Math.max(...memory.map((rank) => rank.peak));
  const pairs = schedule.slots.some((order) => order.some((slot) => slot.length > 3));
  return { name, schedule, costs, ...timeline, busy, idle, bubble, other, memory, peak, pairs };
}

/* ---- files ---- */

/** A schedule in the JSON that `dualpipe show --json` writes, as the page's own; throws what is wrong. */
function readSchedule(text) {
  const { name, pipes, orders, num_microbatches } = JSON.parse(text);
  if (typeof name !== "string" || !Array.isArray(pipes) || !Array.isArray(orders) || !num_microbatches)
    throw new Error("no schedule; give a file that dualpipe show --json wrote");
  const rankOf = pipes.flat();
  const slots = orders.map((order) => order.map((slot) => slot.split("+").flatMap((text) => {
    const [, stage, op, microbatch] = text.match(/^(\d+)([FBIW])(\d+)$/) || [];
    if (op === undefined || !(Number(stage) in rankOf)) throw new Error(`not an action: ${text}`);
    return [OPS.indexOf(op), Number(stage), Number(microbatch)];
  })));
  const schedule = built(pipes, slots);
  if (schedule.ran.length < slots.flat().length) throw new Error(`${name} never ends; dualpipe check says why`);
  return { ...schedule, name, microbatches: num_microbatches };
}

function writeSchedule({ schedule, name }) {
  const orders = schedule.slots.map((order) => order.map(spelt));
  return JSON.stringify({ name, num_microbatches: schedule.count * schedule.pipes.length, pipes: schedule.pipes, orders });
}

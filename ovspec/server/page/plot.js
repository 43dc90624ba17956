// Small plots, as SVG.

import { svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 60;

/**
 * Return a plot of points (x, y), with both axes from 0.
 * @param {[number, number | null][]} points ascending in x; null: a gap
 * @param {string} label its subject, also for screen readers
 * @param {{format?(value: number): string, unit?: string, note?: string}} [options] `note`: the time of the last value
 */
export function plot(points, label, { format = (value) => value.toFixed(0), unit = "", note = "" } = {}) {
  const figure = document.createElement("figure");
  figure.className = "plot";
  const caption = document.createElement("figcaption");
  const last = points.at(-1)?.[1];
  const sentence = last === undefined ? "nothing yet" : last === null ? "–" : `${format(last)}${unit}${note}`;
  caption.textContent = `${label}: ${sentence}`;
  figure.append(caption);
  if (points.length < 2) return figure;
  const isKnown = points.some(([, y]) => y !== null);
  const highest = Math.max(...points.map(([, y]) => y ?? 0), 1e-9);
  const [first, end] = [points[0][0], points.at(-1)[0]];
  const place = ([x, y]) => `${(((x - first) / (end - first || 1)) * WIDTH).toFixed(1)},${(HEIGHT - (y / highest) * (HEIGHT - 4)).toFixed(1)}`;
  const lines = [[]];
  for (const point of points) {
    if (point[1] === null) lines.push([]);
    else lines.at(-1).push(point);
  }
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": isKnown ? `${label}, at most ${format(highest)}${unit}` : `${label}, nothing yet` });
  for (const line of lines.filter((each) => each.length)) {
    const ends = [line[0], line.at(-1)].map(([x]) => place([x, 0]));
    const middle = line.map(place).join(" ");
    drawing.append(svg("polygon", { class: "area", points: `${ends[0]} ${middle} ${ends[1]}` }));
    drawing.append(svg("polyline", { class: "line", points: `${middle} ${place(line.at(-1))}` })); // one point is a dot
  }
  const top = document.createElement("span");
  top.className = "plot-top";
  top.textContent = isKnown ? `highest ${format(highest)}${unit}` : "";
  top.setAttribute("aria-hidden", "true");
  figure.append(drawing, top);
  return figure;
}

/** Return the points of tokens per second along an answer, from the times of its tokens. */
export function speedPoints(times) {
  const windowMs = Math.min(400, ((times.at(-1)?.[0] ?? 0) - (times[0]?.[0] ?? 0)) / 6);
  const points = [];
  let first = 0;
  let tokens = 0;
  for (let last = 1; last < times.length; last += 1) {
    tokens += times[last][1];
    while (times[last][0] - times[first][0] > windowMs && first < last - 1) tokens -= times[(first += 1)][1];
    const milliseconds = times[last][0] - times[first][0];
    if (milliseconds >= windowMs / 2 && milliseconds > 0) points.push([times[last][0], (1e3 * tokens) / milliseconds]);
  }
  return thin(points, 150);
}

/** Return about `count` points at most, in equal steps. */
export function thin(points, count) {
  const step = Math.ceil(points.length / count);
  return points.filter((_, index) => index % step === 0 || index === points.length - 1);
}

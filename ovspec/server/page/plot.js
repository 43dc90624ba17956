// Small plots, as SVG.

import { svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 60;

/**
 * Return a plot of points (x, y), which begins at 0 on both axes.
 * @param {[number, number][]} points ascending in x
 * @param {string} label what it shows, for everybody
 */
export function plot(points, label, { format = (value) => value.toFixed(0), unit = "" } = {}) {
  const figure = document.createElement("figure");
  figure.className = "plot";
  const caption = document.createElement("figcaption");
  const last = points.at(-1)?.[1];
  caption.textContent = last === undefined ? `${label}: nothing yet` : `${label}: ${format(last)}${unit}`;
  figure.append(caption);
  if (points.length < 2) return figure;
  const highest = Math.max(...points.map(([, y]) => y), 1e-9);
  const [first, end] = [points[0][0], points.at(-1)[0]];
  const place = ([x, y]) => `${(((x - first) / (end - first || 1)) * WIDTH).toFixed(1)},${(HEIGHT - (y / highest) * (HEIGHT - 4)).toFixed(1)}`;
  const line = points.map(place).join(" ");
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${label}, at most ${format(highest)}${unit}` });
  drawing.append(svg("polygon", { class: "area", points: `0,${HEIGHT} ${line} ${WIDTH},${HEIGHT}` }), svg("polyline", { class: "line", points: line }));
  const top = document.createElement("span");
  top.className = "plot-top";
  top.textContent = `${format(highest)}${unit}`;
  top.setAttribute("aria-hidden", "true");
  figure.append(drawing, top);
  return figure;
}

/** Return tokens a second along an answer, from the times at which its tokens came. */
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

/** Return at most about `count` points, evenly drawn. */
export function thin(points, count) {
  const step = Math.ceil(points.length / count);
  return points.filter((_, index) => index % step === 0 || index === points.length - 1);
}

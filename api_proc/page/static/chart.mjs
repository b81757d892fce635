// A small line chart on a canvas: the last two minutes, at the right the present.

import { WINDOW_S } from "./history.mjs";

// Draw lines [{values: (point) => number|null, color, dash}] up to `max`, whose text is `top`, and
// marks at some times.
export function drawChart(canvas, { points, marks, lines, max, top, now, colors }) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (width === 0) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const x = (t) => width - ((now - t) / WINDOW_S) * width;
  const y = (value) => height - 1.5 - (Math.min(value, max) / max) * (height - 4);

  context.strokeStyle = colors.grid;
  context.lineWidth = 1;
  for (const share of [0, 0.5, 1]) line(context, [0, y(max * share)], [width, y(max * share)]);
  context.fillStyle = colors.text;
  context.font = "10px sans-serif";
  context.textBaseline = "top";
  context.fillText(top, 0, y(max) + 3);
  context.strokeStyle = colors.mark;
  context.setLineDash([2, 3]);
  for (const t of marks) line(context, [x(t), 0], [x(t), height]);

  for (const { values, color, dash } of lines) {
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.setLineDash(dash ?? []);
    context.beginPath();
    let isDown = false;
    for (const point of points) {
      const value = values(point);
      if (value === null) {
        isDown = false;
        continue;
      }
      if (isDown) context.lineTo(x(point.t), y(value));
      else context.moveTo(x(point.t), y(value));
      isDown = true;
    }
    context.stroke();
  }
}

function line(context, from, to) {
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...to);
  context.stroke();
}

// Return a round number that is at least `value`: 1, 2 or 5 times a power of ten.
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((digit) => digit * power).find((number) => number >= value);
}

// Numbers for people.
const known = value => typeof value === "number" && Number.isFinite(value);
const digits = (value, most) => value.toFixed(value >= 100 ? 0 : value >= 10 ? Math.min(1, most) : most);

export const count = value => !known(value) ? "–"
  : Math.abs(value) >= 1e9 ? digits(value / 1e9, 2) + " G" : Math.abs(value) >= 1e6 ? digits(value / 1e6, 2) + " M"
  : Math.abs(value) >= 1e4 ? digits(value / 1e3, 1) + " k"
  : Number.isInteger(value) ? String(value) : digits(value, 2);

export const rate = value => !known(value) ? "–" : value >= 1e4 ? count(value) : value >= 99.5 ? value.toFixed(0)
  : value === 0 ? "0" : digits(value, value < 1 ? 2 : 1);

export const duration = value => !known(value) ? "–" : value < 60 ? value.toFixed(0) + " s"
  : value < 3600 ? (value / 60).toFixed(0) + " min" : value < 172800 ? (value / 3600).toFixed(1) + " h"
  : (value / 86400).toFixed(1) + " d";

export const seconds = value => !known(value) ? "–" : value <= 0 ? "0" : value < 0.001 ? (value * 1e6).toFixed(0) + " µs"
  : value < 1 ? digits(value * 1e3, 1) + " ms" : value < 120 ? digits(value, 2) + " s" : duration(value);

export function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < 4) { value /= 1024; unit++; }
  return (unit ? digits(value, 1) : value.toFixed(0)) + " " + units[unit];
}

export const percent = share => !known(share) ? "–" : share > 0 && share < 0.1 ? (100 * share).toFixed(1) + " %"
  : share < 1 && share > 0.995 ? "> 99 %" : (100 * share).toFixed(0) + " %";

export const plural = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;

export const generic = (name, value) => name.endsWith("_bytes") || name.endsWith("_bytes_total") ? bytes(value)
  : name.endsWith("_s") ? seconds(value) : name.endsWith("_ms") ? seconds(value / 1000) : count(value);

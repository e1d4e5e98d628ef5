// Rolls on different grids: other steps to a beat, other lowest keys, other widths.

export const sameGrid = (a, b) => a.perBeat === b.perBeat && a.low === b.low && a.keys === b.keys;

/** Lists of keys of one roll's grid on another's: by time and pitch; what lies outside is left out. */
export function regrid(frames, from, to) {
  if (sameGrid(from, to)) return frames.map((keys) => [...keys]);
  const ratio = from.perBeat / to.perBeat;
  return Array.from({ length: Math.ceil(frames.length / ratio) }, (_, t) => {
    const part = frames.slice(Math.floor(t * ratio), Math.max(Math.floor(t * ratio) + 1, Math.round((t + 1) * ratio)));
    const counts = new Map();
    for (const keys of part) for (const key of keys) counts.set(key, (counts.get(key) || 0) + 1);
    return [...counts].filter(([, n]) => 2 * n >= part.length)  // a coarser step has what sounds for half of it
      .map(([key]) => key + from.low - to.low).filter((key) => key >= 0 && key < to.keys).sort((a, b) => a - b);
  });
}

/** The cells of another grid that one cell lies on. */
export function cells({ t, k }, from, to) {
  const key = k + from.low - to.low;
  if (key < 0 || key >= to.keys) return [];
  const ratio = to.perBeat / from.perBeat;
  const first = Math.floor(t * ratio);
  const last = Math.max(first + 1, Math.round((t + 1) * ratio));
  return Array.from({ length: last - first }, (_, i) => ({ t: first + i, k: key }));
}

// A few beginnings for any music run, beside those of its own data; a chord a beat, in MIDI numbers.

export const PRIMERS = [
  ["C major", [[48, 60, 64, 67]]],
  ["Cadence", [[48, 60, 64, 67], [53, 60, 65, 69], [55, 59, 62, 67], [48, 60, 64, 67]]],
  ["A minor", [[45, 60, 64, 69], [50, 57, 65, 69], [52, 56, 64, 71], [45, 60, 64, 69]]],
  ["Ode to Joy", [[48, 55, 60, 64], [48, 55, 60, 64], [48, 57, 60, 65], [48, 59, 62, 67], [48, 59, 62, 67], [48, 57, 60, 65], [48, 55, 60, 64], [43, 55, 59, 62]]],
  ["Scale", [[60], [62], [64], [65], [67], [69], [71], [72]]],
];

/** The grid that the chords above lie on. */
export const CHORDS = { perBeat: 1, low: 0, keys: 128 };

"use strict";
// One sample plays at a time; its cursor runs over the roll beside the button.
let current = null;
for (const player of document.querySelectorAll(".player")) {
  const audio = player.querySelector("audio");
  const button = player.querySelector("button");
  const time = player.querySelector("output");
  const roll = player.parentElement.querySelector("svg.roll.heard");
  const cursor = roll && roll.querySelector(".cursor");
  const seconds = Number(player.dataset.seconds);
  const stop = () => {
    audio.pause();
    button.textContent = "▶ Play";
    if (roll) roll.classList.remove("playing");
  };
  const follow = () => {
    if (audio.paused) return;
    const part = Math.min(1, audio.currentTime / seconds);
    if (cursor) {
      const span = cursor.dataset.to - cursor.dataset.from;
      cursor.setAttribute("transform", `translate(${span * part} 0)`);
    }
    time.textContent = `${audio.currentTime.toFixed(0)} s`;
    requestAnimationFrame(follow);
  };
  button.addEventListener("click", () => {
    if (!audio.paused) return stop();
    if (current) current();
    current = stop;
    audio.play().then(() => {
      button.textContent = "❚❚ Pause";
      if (roll) roll.classList.add("playing");
      follow();
    }, () => { time.textContent = "this browser cannot play it"; });
  });
  audio.addEventListener("ended", () => { audio.currentTime = 0; stop(); });
  if (roll) {
    roll.addEventListener("click", (event) => {
      const box = roll.getBoundingClientRect();
      const view = roll.viewBox.baseVal.width;
      const at = (event.clientX - box.left) / box.width * view;
      audio.currentTime = Math.max(0, (at - 30) / (view - 30)) * seconds;
    });
  }
}

// Dark or light: as the system says, or as the button was last pressed.
import { update } from "explore/session.js";

const NAMES = { auto: "Colours: system", dark: "Colours: dark", light: "Colours: light" };
let theme = "auto";

function kept() {
  try {
    return localStorage.getItem("rooftrace-colours");
  } catch {
    return null; // a file that is opened from disk may have no storage
  }
}

export function restoreTheme() {
  use(kept() in NAMES ? kept() : "auto");
}

function use(name) {
  theme = name;
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}

export function nextTheme() {
  const names = Object.keys(NAMES);
  use(names[(names.indexOf(theme) + 1) % names.length]);
  try {
    localStorage.setItem("rooftrace-colours", theme);
  } catch {
    // it holds until the page is closed
  }
  update({});
}

export const themeName = () => NAMES[theme];

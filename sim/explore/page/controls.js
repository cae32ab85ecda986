// The settings, by group: each as the scenario language allows it, with its help and, where it is refused, the sentence beside it.
import { frozen } from "explore/api.js";
import { number } from "explore/figures.js";
import { change, ownValue, valueOfControl } from "explore/session.js";
import { html, memo, useEffect, useRef, useState } from "explore/ui.js";
import { valueText } from "explore/state.js";

const STEPS = 240;
/** Groups that are open at first. */
const OPEN = 6;

/** Places of a slider, 0 to STEPS, for values from *low* to *high*. */
export function slider({ minimum, maximum, scale, step, kind }) {
  const log = scale === "log" && minimum > 0;
  const round = (value) => {
    if (kind === "integer") return Math.round(value);
    if (typeof step === "number" && !log) return Number((Math.round((value - minimum) / step) * step + minimum).toPrecision(10));
    return Number(value.toPrecision(3));
  };
  return {
    place: (value) =>
      STEPS *
      (log
        ? Math.log(Math.max(value, minimum) / minimum) / Math.log(maximum / minimum)
        : (value - minimum) / (maximum - minimum)),
    value: (place) =>
      Math.min(
        maximum,
        Math.max(
          minimum,
          round(log ? minimum * (maximum / minimum) ** (place / STEPS) : minimum + ((maximum - minimum) * place) / STEPS),
        ),
      ),
  };
}

/** What a control may be, with the words for it. */
export const choicesOf = (each) =>
  each.choices.map((value, i) => ({ value, label: each.labels?.[i] ?? (value === null ? "none" : String(value)) }));

function Choice({ id, each, value, described }) {
  const choices = choicesOf(each);
  const at = choices.findIndex((choice) => JSON.stringify(choice.value) === JSON.stringify(value));
  return html`<select id=${id} ...${described} onChange=${(event) => change(each, choices[event.currentTarget.value].value)}>
    ${at < 0 && html`<option value="-1" selected disabled>${value === null || value === undefined ? "not set" : valueText(value)}</option>`}
    ${choices.map((choice, i) => html`<option value=${i} selected=${i === at}>${choice.label}</option>`)}
  </select>`;
}

function Typed({ id, each, value, described }) {
  const shown = value === null || value === undefined ? "" : typeof value === "string" ? value : valueText(value);
  const [text, setText] = useState(shown);
  useEffect(() => setText(shown), [shown]);
  const numeric = ["number", "integer"].includes(each.kind);
  const take = () => {
    if (text.trim() === shown) return;
    if (text.trim() === "") change(each, undefined);
    else change(each, numeric && Number.isFinite(Number(text)) ? Number(text) : text.trim());
  };
  return html`<input id=${id} type="text" inputmode=${numeric ? "decimal" : "text"} autocomplete="off" spellcheck=${false}
    placeholder="not set" value=${text} ...${described}
    onInput=${(event) => setText(event.currentTarget.value)} onBlur=${take} onKeyDown=${(event) => event.key === "Enter" && take()} />`;
}

function Slider({ id, each, value, described }) {
  const { place, value: at } = slider(each);
  return html`<input id=${`${id}-slider`} type="range" min="0" max=${STEPS} step="1"
    class=${typeof value === "number" ? "" : "unset"} value=${typeof value === "number" ? place(value) : 0} aria-label=${each.label}
    aria-valuetext=${typeof value === "number" ? `${number(value)} ${each.unit ?? ""}` : "not set"} ...${described}
    onInput=${(event) => change(each, at(Number(event.currentTarget.value)))} />`;
}

function Control({ each, value, own, refused }) {
  const id = `set-${each.key}`;
  const [help, setHelp] = useState(false);
  const described = {
    disabled: frozen(),
    "aria-invalid": refused ? "true" : undefined,
    "aria-describedby": [refused && `${id}-refused`, help && `${id}-help`].filter(Boolean).join(" ") || undefined,
  };
  const set = JSON.stringify(value) !== JSON.stringify(own);
  const slides = ["number", "integer"].includes(each.kind) && each.maximum > each.minimum;
  return html`<div class=${`control ${set ? "set" : ""} ${refused ? "refused" : ""}`}>
    <div class="label">
      <label for=${id}>${each.label}${each.unit ? html` <span class="unit">(${each.unit})</span>` : ""}</label>
      ${set && !frozen() && html`<button type="button" class="quiet" title="Back to the scenario's own value"
        aria-label=${`${each.label}: back to ${valueText(own)}`} onClick=${() => change(each, undefined)}>↺</button>`}
      ${each.help && html`<button type="button" class="quiet" aria-expanded=${help} aria-label=${`What ${each.label} is`}
        onClick=${() => setHelp(!help)}>?</button>`}
    </div>
    ${
      each.kind === "boolean"
        ? html`<input id=${id} type="checkbox" role="switch" checked=${Boolean(value)} ...${described}
          onChange=${(event) => change(each, event.currentTarget.checked)} />`
        : each.kind === "choice"
          ? html`<${Choice} id=${id} each=${each} value=${value} described=${described} />`
          : html`<div class=${slides ? "sliding" : ""}>${slides && html`<${Slider} id=${id} each=${each} value=${value}
            described=${described} />`}<${Typed} id=${id} each=${each} value=${value} described=${described} /></div>`
    }
    ${help && html`<p class="help" id=${`${id}-help`}>${each.help} <code>${each.key}</code></p>`}
    ${refused && html`<p class="sentence" id=${`${id}-refused`}>${refused}</p>`}
  </div>`;
}

const Drawn = memo(Control);

function Group({ group, set, refused, first }) {
  const changes = group.controls.filter((each) => each.key in set).length;
  const has = group.controls.some((each) => each.key === refused?.key);
  const [open, setOpen] = useState(first || changes > 0);
  const ref = useRef(null);
  useEffect(() => {
    if (has) setOpen(true);
  }, [has]);
  return html`<details ref=${ref} open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary><h3>${group.name}</h3>${changes > 0 && html`<span class="count" title="changed from the scenario">${changes}<span
      class="unseen"> changed</span></span>`}</summary>
    ${group.controls.map((each) => html`<${Drawn} key=${each.key} each=${each} value=${valueOfControl(each, set)}
      own=${ownValue(each)} refused=${refused?.key === each.key ? refused.sentence : null} />`)}
  </details>`;
}

export function Controls({ controls, set, refused }) {
  return html`<form onSubmit=${(event) => event.preventDefault()} aria-label="Settings">
    ${controls.groups.map((group, i) => html`<${Group} key=${group.name} group=${group} set=${set} refused=${refused}
      first=${i < OPEN} />`)}
  </form>`;
}

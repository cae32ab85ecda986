// Heads of tables that sort by a column: upwards, downwards, and as it was.
import { html } from "explore/ui.js";

function next(sort, name) {
  if (sort?.name !== name) return { name, way: 1 };
  return sort.way > 0 ? { name, way: -1 } : null;
}

export function SortHead({ name, label, sort, setSort }) {
  const way = sort?.name === name ? sort.way : 0;
  return html`<th scope="col" aria-sort=${way ? (way > 0 ? "ascending" : "descending") : undefined}>
    <button type="button" class="quiet" onClick=${() => setSort(next(sort, name))}>${label}${way ? (way > 0 ? " ↑" : " ↓") : ""}</button></th>`;
}

/** *rows* by `valueOf(row)`, those without a value last; as they are where *sort* is null. */
export function sorted(rows, sort, valueOf) {
  if (!sort) return rows;
  const empty = sort.way * Infinity;
  const key = (row) => valueOf(row) ?? empty;
  return [...rows].sort((a, b) => (key(a) === key(b) ? 0 : sort.way * (key(a) < key(b) ? -1 : 1)));
}

// What every module draws with: Preact and htm (vendored), and a component that is drawn again only where what it is given changed.
import { Component, h, html, render, useEffect, useLayoutEffect, useMemo, useRef, useState } from "explore/vendor/preact.js";

export { h, html, render, useEffect, useLayoutEffect, useMemo, useRef, useState };

export function memo(draw) {
  return class extends Component {
    shouldComponentUpdate(next) {
      const names = new Set([...Object.keys(this.props), ...Object.keys(next)]);
      return [...names].some((name) => this.props[name] !== next[name]);
    }
    render(props) {
      return h(draw, props); // a component of its own, so that its own state draws it again
    }
  };
}

let count = 0;
/** An id that no other element has, the same as long as the component lives. */
export const useId = (prefix) => useMemo(() => `${prefix}-${++count}`, []);

/** The width of an element in pixels, as it changes: `[ref, width]`. */
export function useWidth(first) {
  const ref = useRef(null);
  const [width, setWidth] = useState(first);
  useLayoutEffect(() => {
    const measure = () => {
      const found = Math.floor(ref.current.getBoundingClientRect().width);
      if (found > 0) setWidth(found);
    };
    measure();
    const watch = new ResizeObserver(measure);
    watch.observe(ref.current);
    return () => watch.disconnect();
  }, []);
  return [ref, width];
}

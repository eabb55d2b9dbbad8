// Pointing at one of many small items in a drawing: with a mouse, a thumb or the arrow keys. The item is described in
// words, because a screen reader cannot read a drawing: the host is a slider whose value is the item.

export class Pointing {
  /**
   * `at(x, y)` is the index of the item at a place of the host, in shares of its width and height, or -1;
   * `describe(index)` describes it in words; `mark(index)` marks it in the drawing, with -1 for none.
   */
  constructor(host, name, { at, describe, mark }) {
    this.host = host;
    this.describe = describe;
    this.mark = mark;
    this.count = 0;
    this.index = -1;
    this.resting = "";
    for (const [attribute, value] of Object.entries({ role: "slider", tabindex: 0, "aria-label": name, "aria-valuemin": 0 })) host.setAttribute(attribute, value);
    const point = (event) => {
      const box = host.getBoundingClientRect();
      this.to(at((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height));
    };
    host.addEventListener("pointermove", point);
    host.addEventListener("pointerdown", point);
    host.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.to(-1); // lifting a thumb leaves too, but the description must stay readable
    });
    host.addEventListener("blur", () => this.to(-1));
    host.addEventListener("keydown", (event) => this.key(event));
  }

  /** Set a new number of items; `resting` is the description while none is pointed at. */
  renew(count, resting) {
    this.count = count;
    this.resting = resting;
    this.to(this.index < count ? this.index : -1);
  }

  to(index) {
    this.index = index;
    this.mark(index);
    const words = index < 0 ? this.resting : this.describe(index);
    this.host.setAttribute("aria-valuemax", String(Math.max(0, this.count - 1)));
    this.host.setAttribute("aria-valuenow", String(Math.max(0, index)));
    this.host.setAttribute("aria-valuetext", words);
    this.note?.replaceChildren(words);
  }

  key(event) {
    const last = this.count - 1;
    const moves = { ArrowLeft: this.index - 1, ArrowUp: this.index - 1, ArrowRight: this.index + 1, ArrowDown: this.index + 1, Home: 0, End: last };
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    if (this.index < 0 && event.key !== "Home") this.to(last);
    else this.to(Math.min(last, Math.max(0, moves[event.key])));
  }
}

// What is looked at, kept in the page's address, so that it can be passed on, and stays when the page is read again:
// `#row=0/step 3/1&view=group&sort=-reward`.

class Address {
  constructor() {
    this.values = new URLSearchParams(location.hash.slice(1));
    this.timer = 0;
  }

  /** Return the text of a name, null if there is none. */
  get(name) {
    return this.values.get(name);
  }

  /** Set texts by name; null removes one. Browsers refuse many changes a second, so that they are written together. */
  set(values) {
    for (const [name, value] of Object.entries(values)) {
      if (value === null) this.values.delete(name);
      else this.values.set(name, value);
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.write(), 150);
  }

  write(state = null) {
    clearTimeout(this.timer);
    const text = this.values.toString().replaceAll("%2F", "/");
    if (state !== null || text !== location.hash.slice(1)) {
      history.replaceState(state, "", text ? `#${text}` : location.pathname + location.search);
    }
  }
}

const address = new Address();

// The router's events: fetched, so that a key goes into a header and into no address. Comes again by itself.

const STORED = "diptych.key";
const SILENT_MS = 5000; // a frame comes each second
const SETTLED_MS = 60000;

export class Stream {
  constructor(handlers) {
    this.handlers = handlers; // snapshot, frame, state(name), locked(why)
    this.waitMs = 500;
    this.turn = 0; // who runs; whoever ran before does no more
    this.stop = null;
  }

  useKey(key) {
    sessionStorage.setItem(STORED, key);
    this.waitMs = 500;
    this.run();
  }

  async run() {
    const turn = ++this.turn;
    this.stop?.abort();
    while (turn === this.turn) {
      const key = sessionStorage.getItem(STORED);
      const stop = this.stop = new AbortController(), begun = Date.now();
      let watchdog = setTimeout(() => stop.abort(), SILENT_MS * 2), state = "reconnecting";
      try {
        const headers = key ? { authorization: `Bearer ${key}` } : {};
        const response = await fetch("/dashboard/events", { headers, signal: stop.signal, cache: "no-store" });
        if (turn !== this.turn) return;
        if (response.status === 401 || response.status === 403) {
          sessionStorage.removeItem(STORED);
          this.handlers.state("locked");
          this.handlers.locked({ 401: key && "That key is not known here.", 403: "That key does not open the dashboard." }[response.status]);
          return;
        }
        if (response.ok) {
          await this.read(response.body.getReader(), () => {
            clearTimeout(watchdog);
            watchdog = setTimeout(() => stop.abort(), SILENT_MS);
          });
          if (Date.now() - begun > SETTLED_MS) continue; // a stream ends every few minutes, so that the key is asked for again
        } else state = response.status === 429 ? "too many watchers" : `refused (${response.status})`;
      } catch {
        // What the network does is no fault; what is one has been said where it was.
      } finally {
        clearTimeout(watchdog);
        stop.abort();
      }
      if (turn !== this.turn) return;
      this.handlers.state(state);
      await new Promise((resolve) => setTimeout(resolve, this.waitMs * (0.5 + Math.random()))); // hundreds of pages do not come at once
      this.waitMs = Math.min(this.waitMs * 2, 5000);
    }
  }

  async read(reader, alive) {
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      alive();
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) this.take(event);
    }
  }

  // Only what was understood and shown makes the next wait short again.
  take(event) {
    try {
      const said = JSON.parse(event.slice("data: ".length));
      this.handlers.state("live");
      this.handlers[said.type](said);
      this.waitMs = 500;
    } catch (error) {
      console.error(error);
      throw error;
    }
  }
}

// The router's events: fetched, so that a key goes into a header and into no address. Comes again by itself.

const STORED = "diptych.key";
const SILENT_MS = 5000; // a frame comes each second
const SETTLED_MS = 60000;

export class Stream {
  constructor(handlers) {
    this.handlers = handlers; // snapshot, frame, state(name), locked(why)
    this.waitMs = 500;
  }

  useKey(key) {
    sessionStorage.setItem(STORED, key);
    this.waitMs = 500;
    this.run();
  }

  async run() {
    for (;;) {
      const key = sessionStorage.getItem(STORED);
      const stop = new AbortController(), begun = Date.now();
      let watchdog = setTimeout(() => stop.abort(), SILENT_MS * 2);
      try {
        const headers = key ? { authorization: `Bearer ${key}` } : {};
        const response = await fetch("/dashboard/events", { headers, signal: stop.signal, cache: "no-store" });
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
        } else this.handlers.state(response.status === 429 ? "too many watchers" : `refused (${response.status})`);
      } catch (error) {
        if (error instanceof SyntaxError) console.error(error); // ours; what the network does is no fault
      } finally {
        clearTimeout(watchdog);
        stop.abort();
      }
      this.handlers.state("reconnecting");
      await new Promise((resolve) => setTimeout(resolve, this.waitMs));
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
      for (const event of events) {
        const said = JSON.parse(event.slice("data: ".length));
        this.waitMs = 500;
        this.handlers.state("live");
        this.handlers[said.type](said);
      }
    }
  }
}

// Browsers start no workers from a file. Where the site is opened from its folder, a hidden frame does the search's work.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      const script = document.createElement("script")
      script.src = new URL(url, location.href).href
      frame.hidden = true
      frame.srcdoc = script.outerHTML
      this.inner = new Promise(ready => {
        frame.onload = () => {
          frame.contentWindow.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          ready(frame.contentWindow)
        }
      })
      document.body.appendChild(frame)
    }

    postMessage(data) {
      this.inner.then(inner => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
    }
  }
}

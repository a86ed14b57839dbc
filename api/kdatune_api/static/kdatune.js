// What the pages do beyond HTML. Without it every page still works: links and forms are plain ones.
"use strict";

(() => {
  const view = "#view";
  const seen = new WeakSet();
  const asked = new Map();
  let library = null;

  // Filters change the view alone, as the links of tables do by their attributes; the address follows, so it can be shared.
  function enhance(root) {
    for (const form of root.querySelectorAll("form[data-filters]")) {
      if (seen.has(form)) continue;
      seen.add(form);
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        show(form);
      });
      form.addEventListener("change", () => show(form));
    }
    for (const box of root.querySelectorAll("[data-copy]")) addCopy(box);
    for (const plot of root.querySelectorAll("[data-chart]")) draw(plot);
    for (const form of root.querySelectorAll("form[data-write]")) addWrite(form);
    for (const panel of root.querySelectorAll("[data-regressions]")) fill(panel);
  }

  // The list of regressions is a page of its own: this one does not wait for it.
  function fill(panel) {
    if (seen.has(panel)) return;
    seen.add(panel);
    htmx.ajax("GET", panel.dataset.regressions, { target: panel, select: "#view > section", swap: "outerHTML" });
  }

  function show(form) {
    const given = new URLSearchParams();
    for (const [name, value] of new FormData(form)) if (value !== "") given.append(name, value);
    const path = form.getAttribute("action") + (given.size ? `?${given}` : "");
    if (path === location.pathname + location.search) return;
    if (!document.querySelector(view)) {
      location.assign(path);
      return;
    }
    htmx.ajax("GET", path, { target: view, select: view, swap: "outerHTML", push: path });
  }

  function say(text) {
    document.getElementById("said").textContent = text;
  }

  function addCopy(box) {
    if (seen.has(box) || !navigator.clipboard) return;
    seen.add(box);
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(box.querySelector("code").textContent);
      button.textContent = "Copied";
      say("Copied");
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    box.append(button);
  }

  // A form that writes: its fields but the token are the body.
  function addWrite(form) {
    if (seen.has(form)) return;
    seen.add(form);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const told = form.querySelector("output");
      const { token, ...given } = Object.fromEntries(new FormData(form));
      form.elements.token.value = "";
      const body = Object.fromEntries(Object.entries(given).filter(([, value]) => value !== ""));
      const answer = await fetch(form.action, {
        method: "POST",
        headers: { "Authorization": `Bearer ${token}`, "Content-Type": "application/json" },
        body: JSON.stringify(body),
      });
      if (answer.ok) {
        location.reload();
        return;
      }
      const problem = await answer.json().catch(() => ({}));
      told.textContent = `${answer.status}: ${problem.detail || answer.statusText}`;
    });
    form.hidden = false;
  }

  // Charts
  function load(address) {
    library ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = address;
      script.addEventListener("load", resolve);
      script.addEventListener("error", reject);
      document.head.append(script);
    });
    return library;
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // A figure names its colours by the names of the style sheet ("--c1"), so that it follows the theme.
  function coloured(value) {
    if (typeof value === "string") return value.startsWith("--") ? colour(value) : value;
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, coloured(one)]));
    }
    return value;
  }

  function themed(figure, plot) {
    const { data, layout } = coloured(figure);
    const axis = { gridcolor: colour("--line"), linecolor: colour("--line-strong"), zerolinecolor: colour("--line"), tickcolor: colour("--line-strong"), automargin: true };
    const narrow = plot.clientWidth < 500;
    const out = { ...layout, ...(narrow ? coloured(figure.narrow || {}) : {}) };
    for (const name of ["xaxis", "yaxis", ...Object.keys(layout).filter((key) => /^[xy]axis\d+$/.test(key))]) out[name] = { ...axis, ...layout[name] };
    const margin = { l: 60, r: 16, t: 16, b: 48, ...out.margin };
    let height = narrow ? 352 : 416;
    if (narrow && layout.legend) {
      // below the axis title, one entry a line
      const entries = data.filter((trace) => trace.showlegend !== false).length;
      const inner = height - margin.t - margin.b;
      out.legend = { orientation: "v", x: 0, xanchor: "left", y: -64 / inner, yanchor: "top" };
      margin.b += 16 + 20 * entries;
      height += 16 + 20 * entries;
    }
    return {
      data,
      layout: {
        colorway: ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"].map(colour),
        ...out,
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: colour("--text"), size: 13, family: getComputedStyle(document.body).fontFamily },
        hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--line-strong"), font: { color: colour("--text") } },
        autosize: true,
        margin,
        height,
      },
    };
  }

  async function draw(plot) {
    if (seen.has(plot)) return;
    seen.add(plot);
    try {
      const [answer] = await Promise.all([fetch(plot.dataset.chart), load(plot.dataset.library)]);
      const figure = await answer.json();
      if (!answer.ok) throw new Error(figure.detail || answer.statusText);
      if (!plot.isConnected) return;
      plot.textContent = "";
      if (figure.empty) {
        const note = document.createElement("p");
        note.className = "note";
        note.textContent = figure.empty;
        plot.append(note);
        plot.dataset.drawn = "empty";
        return;
      }
      asked.set(plot, figure);
      const { data, layout } = themed(figure, plot);
      await Plotly.newPlot(plot, data, layout, { responsive: true, displayModeBar: false });
      plot.dataset.drawn = "yes";
    } catch (error) {
      plot.textContent = `The chart cannot be drawn: ${error.message}`;
      plot.dataset.drawn = "failed";
    }
  }

  function redraw() {
    for (const [plot, figure] of asked) {
      if (!plot.isConnected) {
        asked.delete(plot);
        continue;
      }
      const { data, layout } = themed(figure, plot);
      Plotly.react(plot, data, layout);
    }
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("(max-width: 40rem)").addEventListener("change", redraw);

  // New content, however it came, is enhanced like the first.
  new MutationObserver((changes) => {
    for (const change of changes) {
      for (const node of change.addedNodes) {
        if (node instanceof Element && !node.closest(".plot")) {
          enhance(node.parentElement || node);
          const told = node.matches(view) ? node.querySelector("[data-said]") : null;
          if (told) say(told.dataset.said);
        }
      }
    }
  }).observe(document.getElementById("main"), { childList: true, subtree: true });
  enhance(document);
})();

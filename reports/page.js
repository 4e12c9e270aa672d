// Charts of the page. Reads the figures in #data, draws them with plotly.js in the colours of the style sheet, and keeps
// one set of visible states for all charts.
(function () {
  'use strict';
  const data = JSON.parse(document.getElementById('data').textContent);
  const root = document.documentElement;
  const element = (id) => document.getElementById(id);
  const narrow = () => window.innerWidth <= 760;

  // ---- states: colour, dash and symbol tell them apart ----
  const dashes = ['solid', 'dash', 'dashdot', 'longdash'];
  const symbols = ['circle', 'square', 'diamond', 'triangle-up', 'cross', 'x', 'triangle-down', 'star'];
  const palette = 8;
  let next = 0, separate = 0;  // separate copies of one read format often give the same curve: dashes let the lower one through
  const states = data.states.map((state, index) => {
    if (index === data.baseline) return {...state, index, baseline: true, color: '--ink', dash: 'solid', symbol: 'circle-open', shown: true};
    if (index === data.floor) return {...state, index, floor: true, color: '--floor', dash: 'dot', symbol: 'line-ew-open', shown: true};
    const k = next++, turn = Math.floor(k / palette) + (state.separate ? separate++ : 0);
    return {...state, index, color: '--s' + (k % palette), dash: dashes[turn % dashes.length], symbol: symbols[k % symbols.length], shown: true};
  });
  const measured = states.filter((s) => !s.baseline);
  const visible = () => measured.filter((s) => s.shown);

  // ---- theme ----
  const choices = {theme: 'auto', view: 'mean', axis: 'log', task: 0};
  const dark = window.matchMedia('(prefers-color-scheme: dark)');
  let printing = false;
  function applyTheme() {
    const isDark = !printing && (choices.theme === 'dark' || (choices.theme === 'auto' && dark.matches));
    root.dataset.theme = isDark ? 'dark' : 'light';
  }
  const token = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  function faded(color, alpha) {
    const n = parseInt(color.slice(1), 16);
    return `rgba(${n >> 16 & 255},${n >> 8 & 255},${n & 255},${alpha})`;
  }

  // ---- texts ----
  const count = (n) => n.toLocaleString('en-US');
  const short = (n) => n >= 1024 && n % 1024 === 0 ? n / 1024 + 'K' : String(n);
  const span = (first, last) => last - first === 1 ? `position ${count(first)}` : `positions ${count(first)} to ${count(last - 1)}`;
  function figure(x) {
    if (x === null || x === undefined) return '–';
    if (x === 0) return '0';
    return Math.abs(x) < 1e-3 || Math.abs(x) >= 1e5 ? x.toExponential(2) : String(Number(x.toPrecision(3)));
  }
  const limits = (low, high) => low === null || high === null ? '' : ` [${figure(low)}, ${figure(high)}]`;
  const html = (text) => text.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
  const clipped = (name) => html(name.length > 20 ? name.slice(0, 19) + '…' : name);

  // ---- common layout ----
  function axis(title, more) {
    return {title: {text: title, font: {size: 12, color: token('--muted')}, standoff: 8}, gridcolor: token('--grid'), linecolor: token('--line'),
      zeroline: false, showline: true, ticks: '', tickfont: {size: narrow() ? 10 : 11, color: token('--muted')}, automargin: true, ...more};
  }
  function layout(more) {
    const paper = printing ? {autosize: false, width: 660, height: 320} : {autosize: true};
    return {...paper, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', showlegend: false, hovermode: 'closest', dragmode: narrow() ? false : 'zoom',
      font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: token('--ink')}, margin: {l: 58, r: 16, t: narrow() ? 10 : 26, b: 44}, modebar: {bgcolor: 'rgba(0,0,0,0)', color: token('--muted'), activecolor: token('--ink')},
      hoverlabel: {bgcolor: token('--panel'), bordercolor: token('--line'), font: {size: 12, color: token('--ink')}, align: 'left'}, ...more};
  }
  const settings = () => ({displaylogo: false, responsive: true, displayModeBar: narrow() ? false : 'hover', modeBarButtons: [['toImage', 'zoom2d', 'pan2d', 'resetScale2d']], plotlyServerURL: '', showTips: false});
  const logTicks = () => ({type: 'log', exponentformat: 'power', minor: {showgrid: false}, tickfont: {size: narrow() ? 9 : 10, color: token('--muted')}});
  /// A logarithmic axis has no place for 0 (the KL before a state is encoded for the first time).
  const positive = (row) => row.map((v) => v > 0 ? v : null);
  function decades(values) {
    let low = Infinity, high = -Infinity;
    for (const v of values) if (v > 0) { low = Math.min(low, v); high = Math.max(high, v); }
    if (high < low) return {range: [-6, 0], dtick: 1};
    const a = Math.log10(low), b = Math.log10(high), gap = Math.max(0.12, 0.04 * (b - a));
    return {range: [a - gap, b + gap], dtick: b - a < 2.2 ? 'D2' : Math.max(1, Math.ceil((b - a) / (narrow() ? 6 : 9)))};
  }
  /// Marks 4 times apart in a wide chart on a screen, otherwise 16.
  function positionAxis(last, wide) {
    const begin = data.coarse.first[data.coarse.first.findIndex((_, i) => data.coarse.states.some((s) => s.kl[i] !== null))] || 0;
    if (choices.axis === 'linear') return axis('Tokens seen', {type: 'linear', tickformat: ',d', nticks: narrow() ? 4 : 9, range: [0, last * 1.01]});
    const ticks = [], step = wide && !narrow() && !printing ? 4 : 16;
    for (let t = 1; t <= last; t *= step) ticks.push(t);
    if (last / ticks[ticks.length - 1] >= step / 2) ticks.push(last);
    return axis('Tokens seen', {type: 'log', tickmode: 'array', tickvals: ticks, ticktext: ticks.map(short), tickangle: 0, range: [Math.log10(begin + 1) - 0.03, Math.log10(last) + 0.03]});
  }
  const middle = (first, last) => choices.axis === 'linear' ? (first + last + 1) / 2 : Math.sqrt((first + 1) * last);
  function band(xs, low, high, state) {
    const traces = [];
    let x = [], a = [], b = [];
    const close = () => {
      if (x.length > 1) traces.push({x: x.concat([...x].reverse()), y: b.concat([...a].reverse()), fill: 'toself', fillcolor: faded(token(state.color), 0.16), line: {width: 0}, mode: 'lines', hoverinfo: 'skip'});
      x = []; a = []; b = [];
    };
    xs.forEach((at, i) => {
      if (low[i] === null || high[i] === null) return close();
      x.push(at); a.push(low[i]); b.push(high[i]);
    });
    close();
    return traces;
  }
  const line = (state, width) => ({color: token(state.color), width: width || (state.floor ? 1.6 : 2), dash: state.dash});
  /// Names at the right ends of lines, moved apart until none covers another. `ends`: [state, y in axis units].
  function endLabels(ends, range, height) {
    const unit = (range[1] - range[0]) / height, least = 14 * unit;
    ends.sort((p, q) => p.y - q.y);
    ends.forEach((e, i) => { e.at = i === 0 ? e.y : Math.max(e.y, ends[i - 1].at + least); });
    const over = ends.length ? ends[ends.length - 1].at - range[1] : 0;
    if (over > 0) for (let i = ends.length - 1, top = range[1]; i >= 0; --i) { ends[i].at = Math.min(ends[i].at, top); top = ends[i].at - least; }
    return ends.map((e) => ({xref: 'paper', x: 1, xanchor: 'left', xshift: 6, yref: 'y', y: e.at, text: clipped(e.state.name), showarrow: false, font: {size: 11, color: token(e.state.color)}}));
  }

  // ---- charts ----
  function drawDrift() {
    const cells = choices.view === 'mean' ? data.coarse : data.fine;
    const xs = cells.first.map((f, i) => middle(f, cells.last[i]));
    const traces = [], ends = [], values = [];
    for (const state of visible()) {
      const figures = cells.states[state.index];
      if (choices.view === 'mean') {
        traces.push(...band(xs, figures.kl_low, figures.kl_high, state));
        traces.push({x: xs, y: positive(figures.kl), mode: 'lines', line: line(state), name: html(state.name), connectgaps: false,
          text: xs.map((_, i) => `<b>${html(state.name)}</b><br>${span(cells.first[i], cells.last[i])}<br>mean KL ${figure(figures.kl[i])}${limits(figures.kl_low[i], figures.kl_high[i])} nats`), hovertemplate: '%{text}<extra></extra>'});
        values.push(...figures.kl, ...figures.kl_low, ...figures.kl_high);
      } else if (choices.view === 'fine') {
        traces.push({x: xs, y: positive(figures.mean), mode: 'lines', line: {...line(state, 1.3), shape: 'hvh'}, name: html(state.name),
          text: xs.map((_, i) => `<b>${html(state.name)}</b><br>${span(cells.first[i], cells.last[i])}<br>mean KL ${figure(figures.mean[i])} nats`), hovertemplate: '%{text}<extra></extra>'});
        values.push(...figures.mean);
      } else {
        traces.push({x: figures.at.map((t) => t < 0 ? null : t + 1), y: positive(figures.max), mode: 'markers', marker: {color: token(state.color), symbol: state.symbol, size: 5}, name: html(state.name),
          text: figures.at.map((t, i) => `<b>${html(state.name)}</b><br>largest KL of ${span(cells.first[i], cells.last[i])}<br>${figure(figures.max[i])} nats at position ${count(t)}${figures.of ? ' of ' + html(data.documents[figures.of[i]]) : ''}<br>smallest ${figure(figures.min[i])}`), hovertemplate: '%{text}<extra></extra>'});
        values.push(...figures.max);
      }
      const row = choices.view === 'mean' ? figures.kl : choices.view === 'fine' ? figures.mean : figures.max;
      const last = [...row].reverse().find((v) => v > 0);
      if (last) ends.push({state, y: Math.log10(last)});
    }
    const {range, dtick} = decades(values);
    const box = element('drift');
    const labels = narrow() ? [] : endLabels(ends, range, box.clientHeight - 70);
    const room = narrow() ? 12 : 24 + 7 * Math.max(4, ...visible().map((s) => Math.min(20, s.name.length)));
    Plotly.react(box, traces, layout({xaxis: positionAxis(data.last_bin.last, true), yaxis: axis(choices.view === 'extremes' ? 'KL, nats' : 'Mean KL, nats', {...logTicks(), range, dtick}), margin: {l: 58, r: room, t: narrow() ? 10 : 26, b: 44}, annotations: labels}), settings());
  }

  function drawTop1() {
    const cells = data.coarse;
    const xs = cells.first.map((f, i) => middle(f, cells.last[i]));
    const percent = (row) => row.map((v) => v === null ? null : 100 * v);
    const traces = [];
    let least = 100;
    for (const state of visible()) {
      const figures = cells.states[state.index];
      const y = percent(figures.top1), low = percent(figures.top1_low), high = percent(figures.top1_high);
      traces.push(...band(xs, low, high, state));
      traces.push({x: xs, y, mode: 'lines', line: line(state), text: xs.map((_, i) => `<b>${html(state.name)}</b><br>${span(cells.first[i], cells.last[i])}<br>${figure(y[i])} %${limits(low[i], high[i])}`), hovertemplate: '%{text}<extra></extra>'});
      for (const v of [...y, ...low]) if (v !== null) least = Math.min(least, v);
    }
    Plotly.react(element('top1'), traces, layout({xaxis: positionAxis(data.last_bin.last, false), yaxis: axis('Agreement, %', {range: [least - 0.05 * (100.5 - least), 100 + 0.04 * (100.5 - least)], nticks: 6})}), settings());
  }

  function drawTail() {
    const traces = visible().map((state) => ({x: positive(state.exceedance.kl), y: state.exceedance.share, mode: 'lines', line: line(state),
      text: state.exceedance.share.map((v, i) => `<b>${html(state.name)}</b><br>${figure(100 * v)} % of positions<br>have KL ≥ ${figure(state.exceedance.kl[i])} nats`), hovertemplate: '%{text}<extra></extra>'}));
    const x = decades(visible().flatMap((s) => s.exceedance.kl.slice(0, Math.ceil(s.exceedance.kl.length * 0.985))));
    const y = decades(measured.flatMap((s) => s.exceedance.share));
    Plotly.react(element('tail'), traces, layout({xaxis: axis('KL, nats', {...logTicks(), range: x.range, dtick: x.dtick === 'D2' ? (narrow() ? 1 : 'D2') : Math.max(x.dtick, narrow() ? 3 : 2)}),
      yaxis: axis('Share of positions', {...logTicks(), range: y.range, dtick: 1, tickformat: '~%'})}), settings());
  }

  function drawPareto() {
    const points = visible().filter((s) => s.bits !== null && s.last.kl > 0);
    const traces = [];
    const front = [];
    for (const s of points.filter((p) => !p.floor).sort((p, q) => p.bits - q.bits || p.last.kl - q.last.kl)) {
      if (!front.length || s.last.kl < front[front.length - 1].last.kl) front.push(s);
    }
    traces.push({x: front.map((s) => s.bits), y: front.map((s) => s.last.kl), mode: 'lines', line: {color: token('--muted'), width: 1, shape: 'hv', dash: 'dot'}, hoverinfo: 'skip'});
    for (const s of points) {
      const known = s.last.low !== null && s.last.high !== null;
      traces.push({x: [s.bits], y: [s.last.kl], mode: 'markers', marker: {color: token(s.color), symbol: s.symbol, size: 10, line: {width: 1.5, color: token(s.color)}},
        error_y: known ? {type: 'data', symmetric: false, array: [s.last.high - s.last.kl], arrayminus: [s.last.kl - s.last.low], color: token(s.color), thickness: 1.5, width: 4} : undefined,
        text: [`<b>${html(s.name)}</b><br>${figure(s.bits)} bits an element<br>mean KL ${figure(s.last.kl)}${limits(s.last.low, s.last.high)} nats`], hovertemplate: '%{text}<extra></extra>'});
    }
    const x = points.map((s) => s.bits);
    const widest = Math.max(8, ...x);
    const y = decades(points.flatMap((s) => [s.last.kl, s.last.low, s.last.high]));
    y.range[1] += 0.08 * (y.range[1] - y.range[0]);  // for the name above the highest point
    // Names lie right of their points, left of those in the right half; equal neighbours move apart.
    const height = element('pareto').clientHeight - 70, least = 13 * (y.range[1] - y.range[0]) / height;
    const labels = points.map((s) => ({s, left: s.bits > 0.55 * widest, y: Math.log10(s.last.kl)})).sort((p, q) => p.y - q.y);
    labels.forEach((l, i) => {
      for (let j = 0; j < i; ++j) {
        const k = labels[j];
        if (Math.abs(k.s.bits - l.s.bits) < 0.3 * widest && l.y - k.y < least) l.y = k.y + least;
      }
    });
    Plotly.react(element('pareto'), traces, layout({xaxis: axis('Bits a state element', {range: [0, widest * 1.08], nticks: 8}), yaxis: axis('Mean KL in the last bin, nats', {...logTicks(), range: y.range, dtick: y.dtick}),
      annotations: labels.map((l) => ({x: l.s.bits, y: l.y, xanchor: l.left ? 'right' : 'left', xshift: l.left ? -6 : 6, yshift: 10, text: clipped(l.s.name), showarrow: false, font: {size: narrow() ? 10 : 11, color: token(l.s.color)}}))}), settings());
  }

  function drawErrors() {
    const {layers, maps} = data.errors;
    const map = maps[Number(element('map').value)];
    const state = states[map.state];
    const heads = Math.max(...layers.map((l) => l.heads));
    const xs = [...Array(heads).keys()], names = layers.map((l) => String(l.index));
    let low = Infinity, high = -Infinity;
    for (const row of map.error) for (const v of row) if (v > 0) { low = Math.min(low, v); high = Math.max(high, v); }
    const none = low > high;  // the error is 0 everywhere
    const z = map.error.map((row) => row.map((v) => v === null ? null : v > 0 ? Math.log10(v) : none ? 0 : Math.log10(low)));
    const ticks = [];
    if (none) ticks.push(0);
    else for (let e = 0; e <= 4; ++e) ticks.push(Math.log10(low) + e / 4 * (Math.log10(high) - Math.log10(low)));
    const ramp = [[0, '#00224e'], [0.25, '#3b496c'], [0.5, '#7d7c78'], [0.75, '#bcae6c'], [1, '#fee838']];
    Plotly.react(element('errors'), [{type: 'heatmap', x: xs, y: names, z, colorscale: ramp, hoverongaps: false, xgap: heads > 48 ? 0 : 1, ygap: 1,
      colorbar: {thickness: 12, outlinewidth: 0, tickvals: ticks, ticktext: ticks.map((t) => none ? '0' : figure(10 ** t)), tickfont: {size: 10, color: token('--muted')}},
      text: map.error.map((row, l) => row.map((v, h) => `<b>${html(state.name)}${map.role ? ', ' + map.role + ' copy' : ''}</b><br>layer ${layers[l].index} (${html(layers[l].kind)}), head ${h}<br>relative error ${figure(v)}${layers[l].decay[h] !== undefined && layers[l].decay[h] !== null ? '<br>mean decay ' + layers[l].decay[h] : ''}`)),
      hovertemplate: '%{text}<extra></extra>'}],
      layout({xaxis: axis('Head', {nticks: 9, showgrid: false, constrain: 'domain'}), yaxis: axis('Layer', {type: 'category', autorange: 'reversed', showgrid: false, nticks: 16})}), settings());
  }

  const answered = () => states.filter((s) => s.shown);
  const points = (c) => c.change === undefined ? '' : `<br>change ${figure(c.change)}${limits(c.change_low, c.change_high)} points, lost ${count(c.lost)}, gained ${count(c.gained)}`;
  /// Bars of `key` (percent), a group each; with intervals when `key` is the share of right answers.
  function bars(box, key, title, groups, names) {
    const traces = answered().map((state) => {
      const found = groups.map((g) => g.find((e) => e.state === state.index)).map((e) => e && e.counts);
      if (!found.some((c) => c && c[key] !== null)) return null;
      const y = found.map((c) => c ? c[key] : null);
      const error = key !== 'correct' ? undefined : {type: 'data', symmetric: false, array: found.map((c) => c && c.high !== null ? c.high - c.correct : 0), arrayminus: found.map((c) => c && c.low !== null ? c.correct - c.low : 0), thickness: 1.3, width: 3, color: token('--ink')};
      return {type: 'bar', x: names, y, marker: {color: faded(token(state.color), 0.75)}, error_y: error,
        text: found.map((c) => c ? `<b>${html(state.name)}</b><br>${figure(c.correct)} % correct${limits(c.low, c.high)}<br>of ${count(c.answers)} answers${points(c)}<br>truncated ${figure(c.truncated)} %, no answer ${figure(c.without)} %` : ''), textposition: 'none', hovertemplate: '%{text}<extra></extra>'};
    }).filter(Boolean);
    Plotly.react(element(box), traces, layout({barmode: 'group', bargap: 0.25, xaxis: axis('', {type: 'category', showgrid: false}), yaxis: axis(title, {rangemode: 'tozero'})}), settings());
  }
  const everywhere = () => data.answers.tasks.map((t) => t.states.map((s) => ({state: s.state, counts: s.all})));
  const taskNames = () => data.answers.tasks.map((t) => html(t.name));
  function drawAccuracy() {
    bars('accuracy', 'correct', 'Correct, %', everywhere(), taskNames());
  }
  function drawTruncation() {
    bars('truncation', 'truncated', 'Truncated, %', everywhere(), taskNames());
  }
  const chosenTask = () => data.answers.tasks[choices.task];
  function drawQuartiles() {
    const task = chosenTask(), places = ['shortest', '2nd', '3rd', 'longest'];
    const names = places.map((p, q) => task.lengths[q] ? `${p}<br>${task.lengths[q]}` : p);
    bars('quartiles', 'correct', 'Correct, %', [0, 1, 2, 3].map((q) => task.states.map((s) => ({state: s.state, counts: s.quartiles[q]}))), names);
  }
  function drawLoss() {
    const found = chosenTask().states.map((s) => ({...states[s.state], counts: s.all})).filter((s) => s.shown && s.bits !== null && s.counts.change !== undefined);
    const front = [];
    for (const s of [...found].sort((p, q) => p.bits - q.bits || q.counts.change - p.counts.change)) {
      if (!front.length || s.counts.change > front[front.length - 1].counts.change) front.push(s);
    }
    const traces = [{x: front.map((s) => s.bits), y: front.map((s) => s.counts.change), mode: 'lines', line: {color: token('--muted'), width: 1, shape: 'hv', dash: 'dot'}, hoverinfo: 'skip'}];
    for (const s of found) {
      const c = s.counts, known = c.change_low !== null && c.change_high !== null;
      traces.push({x: [s.bits], y: [c.change], mode: 'markers', marker: {color: token(s.color), symbol: s.symbol, size: 10, line: {width: 1.5, color: token(s.color)}},
        error_y: known ? {type: 'data', symmetric: false, array: [c.change_high - c.change], arrayminus: [c.change - c.change_low], color: token(s.color), thickness: 1.5, width: 4} : undefined,
        text: [`<b>${html(s.name)}</b><br>${figure(s.bits)} bits an element${points(c)}<br>McNemar p ${figure(c.p)}`], hovertemplate: '%{text}<extra></extra>'});
    }
    const widest = Math.max(8, ...found.map((s) => s.bits));
    Plotly.react(element('loss'), traces, layout({xaxis: axis('Bits a state element', {range: [0, widest * 1.08], nticks: 8}), yaxis: axis('Change, points', {zeroline: true, zerolinecolor: token('--line')}),
      annotations: found.map((s) => ({x: s.bits, y: s.counts.change, xanchor: s.bits > 0.55 * widest ? 'right' : 'left', xshift: s.bits > 0.55 * widest ? -8 : 8, yshift: 9, text: clipped(s.name), showarrow: false, font: {size: narrow() ? 10 : 11, color: token(s.color)}}))}), settings());
  }

  const charts = [['drift', drawDrift], ['top1', drawTop1], ['tail', drawTail], ['pareto', drawPareto], ['errors', drawErrors], ['accuracy', drawAccuracy], ['truncation', drawTruncation], ['quartiles', drawQuartiles], ['loss', drawLoss]];
  function draw() {
    for (const [id, make] of charts) if (element(id)) make();
  }

  // ---- controls ----
  const lineDash = {solid: '', dash: '6 4', dot: '2 3', dashdot: '6 3 2 3', longdash: '10 4'};
  function drawChips() {
    const box = element('chips');
    box.textContent = '';
    for (const state of data.answers ? states : measured) {
      const chip = document.createElement('button');
      chip.type = 'button';
      chip.setAttribute('aria-pressed', String(state.shown));
      chip.title = state.floor ? 'the floor: ' + state.name : state.name;
      chip.innerHTML = `<svg width="26" height="10" aria-hidden="true"><line x1="0" y1="5" x2="26" y2="5" stroke="var(${state.color})" stroke-width="2.5" stroke-dasharray="${lineDash[state.dash]}"/></svg><span></span>`;
      chip.lastChild.textContent = state.name + (state.floor ? ' (floor)' : '');
      chip.addEventListener('click', () => { state.shown = !state.shown; chip.setAttribute('aria-pressed', String(state.shown)); draw(); });
      box.append(chip);
    }
  }
  element('all').addEventListener('click', () => { for (const s of states) s.shown = true; drawChips(); draw(); });
  for (const group of document.querySelectorAll('[data-choice]')) {
    group.addEventListener('click', (event) => {
      const button = event.target.closest('button');
      if (!button) return;
      choices[group.dataset.choice] = button.dataset.value;
      for (const b of group.children) b.setAttribute('aria-pressed', String(b === button));
      applyTheme();
      draw();
    });
  }
  function fillSelect(id, texts, redraw) {
    const select = element(id);
    if (!select) return;
    texts.forEach((text, i) => select.append(new Option(text, i)));
    select.addEventListener('change', redraw);
  }
  if (data.errors) {
    fillSelect('map', data.errors.maps.map((m) => states[m.state].name + (m.role ? ', ' + m.role + ' copy' : '')), drawErrors);
    const first = data.errors.maps.findIndex((m) => m.state !== data.floor);
    if (first > 0) element('map').selectedIndex = first;
  }
  const taskSelects = [...document.querySelectorAll('select.task')];
  for (const select of taskSelects) {
    data.answers.tasks.forEach((task, i) => select.append(new Option(task.name, i)));
    select.addEventListener('change', () => {
      choices.task = Number(select.value);
      for (const other of taskSelects) other.selectedIndex = choices.task;
      for (const [id, make] of [['quartiles', drawQuartiles], ['loss', drawLoss]]) if (element(id)) make();
    });
  }

  dark.addEventListener('change', () => { applyTheme(); draw(); });
  let wasNarrow = narrow();
  window.addEventListener('resize', () => { if (narrow() !== wasNarrow) { wasNarrow = narrow(); draw(); } });
  let closed = [];
  window.addEventListener('beforeprint', () => {
    printing = true;
    closed = [...document.querySelectorAll('details.printed:not([open])')];
    for (const d of closed) d.open = true;
    applyTheme();
    draw();
  });
  window.addEventListener('afterprint', () => {
    printing = false;
    for (const d of closed) d.open = false;
    applyTheme();
    draw();
  });

  applyTheme();
  drawChips();
  draw();
})();

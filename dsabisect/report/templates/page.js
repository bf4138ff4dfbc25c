"use strict";
// Comfort only: without scripts every number, log and command is on the page. No network, nothing kept.
(function () {
  var $ = function (id) { return document.getElementById(id); };
  var live = $("live");
  document.querySelectorAll("button[data-copy]").forEach(function (button) {
    button.hidden = false;
    button.addEventListener("click", function () {
      var pre = button.parentNode.querySelector("pre");
      var chosen = window.getSelection();
      chosen.selectAllChildren(pre);
      var done = false;
      try { done = document.execCommand("copy"); } catch (e) { done = false; }
      live.textContent = done ? "copied" : "press Ctrl+C to copy";
      button.textContent = done ? "copied" : "select + Ctrl+C";
    });
  });

  var table = $("full");
  if (table) {
    var data = JSON.parse($("cells").textContent);
    var heads = Array.prototype.slice.call(table.tHead.rows[0].cells, 1);
    var names = heads.map(function (th) { return th.textContent; });
    var rows = Array.prototype.filter.call(table.tBodies[0].rows, function (r) { return r.className !== "gap"; });
    var gaps = Array.prototype.filter.call(table.tBodies[0].rows, function (r) { return r.className === "gap"; });
    var current = null;
    var WORDS = { g: "good", b: "bad", m: "some bad", s: "untestable", a: "absent", n: "not measured" };

    var choose = function (td) {
      if (current) current.tabIndex = -1;
      current = td;
      td.tabIndex = 0;
      td.focus();
      var r = rows.indexOf(td.parentNode), c = td.cellIndex - 1, found = data.cells[r][c];
      var told = $("told");
      told.textContent = rows[r].cells[0].textContent + "\n" + names[c] + ": " + (WORDS[td.className[0]] || "");
      if (!found || !found.length) return;
      told.textContent += " · " + data.words[found[0]] + (found[2] >= 0 ? " · error " + found[2] + " % of what is allowed" : "");
      if (found[1] >= 0 && data.logs[found[1]]) {
        var link = document.createElement("a");
        link.href = table.dataset.logs + "/" + data.logs[found[1]];
        link.textContent = "log";
        told.append(" · ", link);
      }
    };
    table.addEventListener("click", function (e) {
      var td = e.target.closest("td");
      if (td && td.parentNode.className !== "gap") choose(td);
    });
    var STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    table.addEventListener("keydown", function (e) {
      var step = STEPS[e.key];
      if (!step || !current) return;
      e.preventDefault();
      var r = rows.indexOf(current.parentNode), c = current.cellIndex;
      do { r += step[0]; c += step[1]; } while (rows[r] && rows[r].cells[c] && c > 0 && rows[r].cells[c].offsetParent === null);
      if (rows[r] && c > 0 && rows[r].cells[c]) choose(rows[r].cells[c]);
    });
    if (rows.length && rows[0].cells.length > 1) { current = rows[0].cells[1]; current.tabIndex = 0; }

    var filter = function () {
      var wanted = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
      var badOnly = $("bad").checked, changing = $("steps").checked;
      var has = function (text) { return wanted.every(function (w) { return text.indexOf(w) >= 0; }); };
      var shownColumns = 0, shownRows = 0;
      var columnMatches = names.map(function (n) { return has(n.toLowerCase()); });
      var rowMatches = rows.map(function (r) { return has(r.cells[0].textContent.toLowerCase()); });
      var anyColumn = columnMatches.some(Boolean), anyRow = rowMatches.some(Boolean);
      // Words that name columns choose columns, words that name commits choose commits.
      var keepColumns = names.map(function (_, c) {
        var bad = rows.some(function (r) { return /[bm]/.test(r.cells[c + 1].className[0] || ""); });
        return (!wanted.length || columnMatches[c] || (!anyColumn && anyRow)) && (!badOnly || bad);
      });
      var keepRows = rows.map(function (r, i) {
        var step = Array.prototype.some.call(r.cells, function (td) { return td.className.indexOf(" t") > 0; });
        return (!wanted.length || rowMatches[i] || anyColumn) && (!changing || step);
      });
      heads.forEach(function (th, c) { th.hidden = !keepColumns[c]; shownColumns += keepColumns[c]; });
      rows.forEach(function (r, i) {
        r.hidden = !keepRows[i]; shownRows += keepRows[i];
        for (var c = 0; c < keepColumns.length; c++) r.cells[c + 1].hidden = !keepColumns[c];
      });
      gaps.forEach(function (r) { r.hidden = changing || wanted.length > 0; });
      $("shown").textContent = shownRows + " of " + rows.length + " commits, " + shownColumns + " of " + names.length + " columns shown";
    };
    ["find", "bad", "steps"].forEach(function (id) { $(id).addEventListener("input", filter); });
    $("tools").hidden = false;
    $("told").hidden = false;
    filter();
  }

  var opened = [];
  window.addEventListener("beforeprint", function () {
    opened = Array.prototype.slice.call(document.querySelectorAll("details:not([open])"));
    opened.forEach(function (d) { d.open = true; });
  });
  window.addEventListener("afterprint", function () { opened.forEach(function (d) { d.open = false; }); });
})();

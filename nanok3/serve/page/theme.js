// The chosen theme, before anything is painted. No choice: that of the system.
const chosen = localStorage.getItem("nanok3.theme");
if (chosen) document.documentElement.dataset.theme = chosen;

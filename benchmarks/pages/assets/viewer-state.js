// What the viewer knows: the columns of the index, the blocks that were unpacked, and what is being looked at.
// The address after # is the whole state (#a=12&node=3&b=40&q=bridge&role=planner), so every view is a link.

const $ = (id) => document.getElementById(id);
const state = {
  a: null,
  b: null,
  node: '',
  nodeB: '',
  tint: 'logprob',
  q: '',
  part: '',
  outcome: '',
  role: '',
  trouble: '',
  label: '',
  env: '',
  sort: '',
};
const remembered = [
  'a',
  'b',
  'node',
  'nodeB',
  'q',
  'part',
  'outcome',
  'role',
  'trouble',
  'label',
  'env',
  'sort',
];
const blocks = new Map();
let columns,
  headline = 'score',
  tours = [],
  items = [], // what the list shows, from top to bottom: headings of parts, headings of tasks, episodes
  rows = [], // the episodes among them
  matches = null,
  picking = false;

const word = (column, i) => columns[column].words[columns[column].codes[i]];
const words = (name) => name.replaceAll('_', ' ');
const taskOf = (i) => `${columns.env.codes[i]}/${columns.task.codes[i]}`;

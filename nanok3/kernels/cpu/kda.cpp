// Kimi Delta Attention on a CPU: forward, backward and one decode step.
//
//   S_t = (I - b_t k_t k_t^T) Diag(e^{g_t}) S_{t-1} + b_t k_t v_t^T,     o_t = s S_t^T q_t
//
// Chunks of C = 16 tokens. Inside one, with E_i = e^{g_1 + ... + g_i}, D_ij = e^{g_{j+1} + ... + g_i} and S the
// state before it:
//   (I + L) Vt = Diag(b) (V - (K.E) S),   L_ij = b_i sum_c k_ic D_ijc k_jc, i > j      (substitution)
//   O = s (Q.E) S + M Vt,                 M_ij = s sum_c q_ic D_ijc k_jc, i >= j
//   S <- Diag(E_C) S + (K . D_C)^T Vt
// Every decay is a running product of e^g: D_ij multiplies the gates between two tokens and nothing else, never
// E_i / E_j. So any gate <= 0 is exact to rounding, no row looks at a later token, and a pair costs no more than
// in a matrix product, of which the causal half would be thrown away.
//
// The state is kept in panels of P = 32 value columns ([panel][K][32]): a panel stays in the first-level
// cache while a chunk reads and updates it. K is padded to 16 and V to 32 with zeros, a short last chunk
// with tokens that change nothing (k = q = v = 0, b = 0, g = 0).
//
// The forward pass saves one state in 4 chunks and every token's error x = v - (prediction), with which the
// backward pass needs no v. It walks blocks of 4 chunks from the last to the first: from the block's state and
// errors it recomputes the states before its chunks, then applies the chain rule of the formulas above. Terms with
// i = j in pair products have no gate in them and are added apart, so that dg is no difference of equals.
// A value column never meets another one. Where heads and sequences are fewer than threads, the panels of a head are
// therefore shared out in `parts`: outputs and states are the same bits, what `prepare` makes is made in each part, and
// the gradients of q, k, g and b come out once per part, to be added up.
#include "simd.h"

namespace {

constexpr int C = 16;     // tokens in a chunk
constexpr int P = 32;     // value columns in a panel
constexpr int BLOCK = 4;  // chunks between two saved states
constexpr int GROUP = 8;  // heads one thread takes together, at most
constexpr bool kWide = W == 16;  // 32 registers of 16 numbers; otherwise 16 of them, too few to hold a column of a chunk

}  // namespace

// One call's inputs. q, k (tokens, H, K); v (tokens, HV, V), null in the backward pass; log_decay (tokens, HV, K);
// beta (tokens, HV); initial_state (N, HV, K, V) float32 or null. Sequence n is the tokens offsets[n] to
// offsets[n + 1], or, without offsets, the n-th `tokens` tokens.
struct Problem {
  const void *q, *k, *v, *log_decay, *beta;
  const float* initial_state;
  const int64_t* offsets;
  int64_t sequences, tokens, H, HV, K, V, parts, threads;
  float scale;
  Type q_type, k_type, v_type, log_decay_type, beta_type;
};

// What the forward pass leaves for the backward pass, null when there is to be none; see state_slot, error_slot.
struct Saved {
  float *states, *errors;  // (tokens / 64, HV, panels, Kp, P), (tokens / 16 + N, HV, panels, C, P)
};

struct Gradients {
  const void* d_o;        // (tokens, HV, V), v's type, as is dv
  const float* d_final;   // (N, HV, K, V) or null
  void* dv;
  void *dq, *dk, *dlog_decay;  // (tokens, HV, parts, K): summed over the parts and over a group's heads by the caller
  void* dbeta;                 // (tokens, HV, parts)
  float* d_initial;            // (N, HV, K, V) or null
  Type dq_type, dk_type, dlog_decay_type, dbeta_type;
};

namespace {

struct Size {
  int K, V, Kp, panels;
  explicit Size(const Problem& p)
      : K(int(p.K)), V(int(p.V)), Kp((int(p.K) + 15) / 16 * 16), panels((int(p.V) + P - 1) / P) {}
  size_t state() const { return size_t(panels) * Kp * P; }
  size_t errors() const { return size_t(panels) * C * P; }
  int columns(int panel) const { return V - panel * P < P ? V - panel * P : P; }
};

// One sequence of one part of a value head: its panels first to last.
struct Task {
  int64_t sequence, head, key_head, begin, end, part;
  int first, last;
};

// What `prepare` makes of a chunk and only the recurrence reads: kept until the next chunk is prepared.
struct Recurrence {
  float *hat_t, *end;  // (Kp, 2C), (C, Kp): hat transposed, K . D_C
  float* moved;        // (C, Kp): each key decayed on to a later token

  static size_t floats(const Size& z) { return size_t(4) * C * z.Kp; }

  void place(Arena& arena, const Size& z) {
    size_t rows = size_t(C) * z.Kp;
    hat_t = arena.take(2 * rows), end = arena.take(rows), moved = arena.take(rows);
  }
};

// What the backward pass reads as well.
struct Chunk {
  float *k, *q, *decay;       // (C, Kp); decay = e^g
  float *hat, *end_t;         // (2C, Kp): [K.E ; s Q.E]; (Kp, C): K . D_C transposed
  float *E, *F;               // (C, Kp): E and D_C
  float* total;               // (Kp): E_C
  float *n, *m, *l;           // (C, C): N, M and L = Diag(beta) N where i > j (M also i = j), nothing elsewhere
  float* beta;                // (C)
  float* vt;                  // (panels, C, P): Vt
  const float* x;             // (panels, C, P): the errors V - (K.E) S, as the forward pass saved them
  int64_t token;              // first token and how many are real
  int count;

  static size_t floats(const Size& z) { return size_t(8) * C * z.Kp + z.Kp + 3 * C * C + C + z.errors(); }

  void place(Arena& arena, const Size& z) {
    size_t rows = size_t(C) * z.Kp;
    for (float** p : {&k, &q, &decay, &end_t, &E, &F}) *p = arena.take(rows);
    for (float** p : {&n, &m, &l}) *p = arena.take(C * C);
    vt = arena.take(z.errors()), hat = arena.take(2 * rows), total = arena.take(z.Kp), beta = arena.take(C);
  }
};

// Inputs of the chunk at `token`, or nothing past the sequence's ends.
void add_inputs(const Problem& p, const Task& t, int64_t token, Ahead& ahead) {
  for (int64_t i = token; i >= t.begin && i < token + C && i < t.end; ++i) {
    const int64_t key_row = (i * p.H + t.key_head) * p.K, row = i * p.HV + t.head;
    ahead.add(p.k, key_row, p.k_type, int(p.K));
    ahead.add(p.q, key_row, p.q_type, int(p.K));
    ahead.add(p.log_decay, row * p.K, p.log_decay_type, int(p.K));
    if (p.v) ahead.add(p.v, row * p.V, p.v_type, int(p.V));
  }
}

void read_keys(const Problem& p, const Size& z, const Task& t, Chunk& c) {
  for (int i = 0; i < C; ++i) {
    int64_t token = c.token + i;
    int row = i * z.Kp, n = i < c.count ? z.K : 0;
    read_row(p.k, (token * p.H + t.key_head) * p.K, p.k_type, n, z.Kp, c.k + row);
    read_row(p.q, (token * p.H + t.key_head) * p.K, p.q_type, n, z.Kp, c.q + row);
    read_row(p.log_decay, (token * p.HV + t.head) * p.K, p.log_decay_type, n, z.Kp, c.decay + row);
    c.beta[i] = i < c.count ? read_one(p.beta, token * p.HV + t.head, p.beta_type) : 0.0f;
  }
}

// Decays and the decayed keys and queries. Rows run down the tokens, so the running products are plain vector
// recurrences over channels.
template <bool kBackward>
void decay_keys(const Problem& p, const Size& z, Chunk& c, Recurrence& rec) {
  const int Kp = z.Kp;
  for (int col = 0; col < Kp; col += W) {
    vf E = splat(1.0f), F = splat(1.0f);
    UNROLL
    for (int i = 0; i < C; ++i) {
      int at = i * Kp + col;
      vf decay = exp_nonpositive(load(c.decay + at));
      E *= decay;
      store(c.decay + at, decay);
      store(c.hat + at, load(c.k + at) * E);
      store(c.hat + C * Kp + at, load(c.q + at) * p.scale * E);
      if (kBackward) store(c.E + at, E);
    }
    store(c.total + col, E);
    UNROLL
    for (int i = C - 1; i >= 0; --i) {
      int at = i * Kp + col;
      store(rec.end + at, load(c.k + at) * F);
      if (kBackward) store(c.F + at, F);
      F *= load(c.decay + at);
    }
  }
}

// Rows row..row + R of N, M and L in columns j and j + 1, R rows as many as registers allow; the first row lies `kAfter`
// tokens after column j (2 stands for 2 or more). Row j of `moved` is k_j decayed on to the row before.
template <int R, int kAfter>
INLINE void pair_tile(const Problem& p, const Size& z, Chunk& c, float* moved, int row, int j) {
  vf n[R][2] = {}, m[R][2] = {};
  float *first = moved + j * z.Kp, *second = first + z.Kp;
  for (int col = 0; col < z.Kp; col += W) {
    vf a = load(first + col), b = load(second + col);
    UNROLL
    for (int r = 0; r < R; ++r) {
      const int at = (row + r) * z.Kp + col;
      vf decay = load(c.decay + at), k = load(c.k + at), q = load(c.q + at);
      if (kAfter + r > 0) a *= decay;
      if (kAfter + r > 1) b *= decay;
      n[r][0] += a * k, n[r][1] += b * k;
      m[r][0] += a * q, m[r][1] += b * q;
    }
    store(first + col, a), store(second + col, b);
  }
  UNROLL
  for (int r = 0; r < R; ++r)
    UNROLL
    for (int s = 0; s < 2; ++s) {
      const int at = (row + r) * C + j + s;
      c.n[at] = sum(n[r][s]);
      c.m[at] = sum(m[r][s]) * p.scale;
      c.l[at] = c.n[at] * c.beta[row + r];
    }
}

void pair_matrices(const Problem& p, const Size& z, Chunk& c, float* moved) {
  constexpr int R = kWide ? 4 : 2;
  memcpy(moved, c.k, size_t(C) * z.Kp * 4);
  for (int row = 0; row < C; row += R) {
    for (int j = 0; j < row; j += 2) pair_tile<R, 2>(p, z, c, moved, row, j);
    pair_tile<R, 0>(p, z, c, moved, row, row);
    if (R == 4) pair_tile<R, -2>(p, z, c, moved, row, row + 2);
  }
}

template <bool kBackward>
void prepare(const Problem& p, const Size& z, const Task& t, int64_t token, Chunk& c, Recurrence& rec) {
  c.token = token;
  c.count = int(t.end - token < C ? t.end - token : C);
  read_keys(p, z, t, c);
  decay_keys<kBackward>(p, z, c, rec);
  if (kWide) transpose(c.hat, z.Kp, C, z.Kp, rec.hat_t, 2 * C);
  if (kWide) transpose(c.hat + C * z.Kp, z.Kp, C, z.Kp, rec.hat_t + C, 2 * C);
  if (kBackward) transpose(rec.end, z.Kp, C, z.Kp, c.end_t, C);
  pair_matrices(p, z, c, rec.moved);
}

// (C, P) floats of one panel from rows of (tokens, HV, V); rows that do not exist are zero.
void read_panel(const void* base, Type type, const Problem& p, const Size& z, const Task& t, const Chunk& c, int panel,
                float* dst) {
  for (int i = 0; i < C; ++i)
    read_row(base, ((c.token + i) * p.HV + t.head) * p.V + panel * P, type, i < c.count ? z.columns(panel) : 0, P,
             dst + i * P);
}

void write_panel(void* base, Type type, const Problem& p, const Size& z, const Task& t, const Chunk& c, int panel,
                 const float* src) {
  for (int i = 0; i < c.count; ++i)
    write_row(base, ((c.token + i) * p.HV + t.head) * p.V + panel * P, type, z.columns(panel), src + i * P);
}

// predicted = hat S: rows 0..15 what the decayed state returns for each key, 16..31 for each query.
void predict(const Size& z, const Chunk& c, const Recurrence& rec, const float* state, float* predicted,
             Ahead& ahead) {
  auto keep = [&](int r, int s, vf acc) { store(predicted + r * P + s, acc); };
  if (kWide) product<P>(2 * C, z.Kp, rec.hat_t, 1, 2 * C, state, P, keep, ahead);
  else product<P>(2 * C, z.Kp, c.hat, z.Kp, 1, state, P, keep, ahead);
}

// Solves (I + L) vt = beta x by substitution for one vector of columns; y holds x, then vt.
INLINE void substitute(const Chunk& c, vf (&y)[C]) {
  UNROLL
  for (int i = 0; i < C; ++i) y[i] *= c.beta[i];
  UNROLL
  for (int j = 0; j < C; ++j)
    UNROLL
    for (int i = j + 1; i < C; ++i) y[i] -= splat(c.l[i * C + j]) * y[j];
}

// x = v - prediction, vt, and out = q's prediction + M vt in place of v; x is kept where there is room for it.
void correct_wide(const Chunk& c, const float* predicted, float* v, float* x, float* vt) {
  for (int col = 0; col < P; col += W) {
    vf y[C];
    UNROLL
    for (int i = 0; i < C; ++i) y[i] = load(v + i * P + col) - load(predicted + i * P + col);
    if (x)
      UNROLL
      for (int i = 0; i < C; ++i) store(x + i * P + col, y[i]);
    substitute(c, y);
    UNROLL
    for (int i = 0; i < C; ++i) store(vt + i * P + col, y[i]);
    UNROLL
    for (int i = 0; i < C; ++i) {
      vf out = load(predicted + (C + i) * P + col);
      UNROLL
      for (int j = 0; j <= i; ++j) out += splat(c.m[i * C + j]) * y[j];
      store(v + i * P + col, out);
    }
  }
}

// The same row by row with four vectors of columns at a time: each row of vt read once serves vt and out.
void correct_narrow(const Chunk& c, const float* predicted, float* v, float* x, float* vt) {
  for (int col = 0; col < P; col += 4 * W)
    for (int i = 0; i < C; ++i) {
      vf y[4], out[4];
      UNROLL
      for (int s = 0; s < 4; ++s) {
        const int at = i * P + col + s * W;
        y[s] = load(v + at) - load(predicted + at);
        if (x) store(x + at, y[s]);
        y[s] *= c.beta[i];
        out[s] = load(predicted + C * P + at);
      }
      for (int j = 0; j < i; ++j) {
        vf l = splat(c.l[i * C + j]), m = splat(c.m[i * C + j]);
        UNROLL
        for (int s = 0; s < 4; ++s) {
          vf earlier = in_register(load(vt + j * P + col + s * W));
          y[s] -= l * earlier, out[s] += m * earlier;
        }
      }
      UNROLL
      for (int s = 0; s < 4; ++s) {
        const int at = i * P + col + s * W;
        store(vt + at, y[s]);
        store(v + at, out[s] + y[s] * c.m[i * C + i]);
      }
    }
}

void correct(const Chunk& c, const float* predicted, float* v, float* x, float* vt) {
  (kWide ? correct_wide : correct_narrow)(c, predicted, v, x, vt);
}

// vt from the errors.
void correct_again(const Chunk& c, const float* x, float* vt) {
  for (int col = 0; kWide && col < P; col += W) {
    vf y[C];
    UNROLL
    for (int i = 0; i < C; ++i) y[i] = load(x + i * P + col);
    substitute(c, y);
    UNROLL
    for (int i = 0; i < C; ++i) store(vt + i * P + col, y[i]);
  }
  for (int col = 0; !kWide && col < P; col += 4 * W)
    for (int i = 0; i < C; ++i) {
      vf y[4];
      UNROLL
      for (int s = 0; s < 4; ++s) y[s] = load(x + i * P + col + s * W) * c.beta[i];
      for (int j = 0; j < i; ++j) {
        vf l = splat(c.l[i * C + j]);
        UNROLL
        for (int s = 0; s < 4; ++s) y[s] -= l * load(vt + j * P + col + s * W);
      }
      UNROLL
      for (int s = 0; s < 4; ++s) store(vt + i * P + col + s * W, y[s]);
    }
}

// next = Diag(E_C) state + end^T vt
void advance(const Size& z, const Chunk& c, const Recurrence& rec, const float* state, const float* vt, float* next,
             Ahead& ahead) {
  product<P>(
      z.Kp, C, rec.end, 1, z.Kp, vt, P,
      [&](int r, int s, vf acc) { store(next + r * P + s, load(state + r * P + s) * c.total[r] + acc); }, ahead);
}

// Steps of `predict` and of `advance`, for a chunk.
int predict_depth(const Size& z) { return z.panels * z.Kp * (2 * C / kTileRows) * (P / tile_columns(P)); }
int advance_depth(const Size& z) { return z.panels * z.Kp * (C / kTileRows) * (P / tile_columns(P)); }

void read_state(const float* src, const Size& z, const Task& t, float* state) {  // (K, V) -> panels; null is zero
  memset(state, 0, z.state() * 4);
  if (!src) return;
  for (int panel = t.first; panel < t.last; ++panel)
    for (int i = 0; i < z.K; ++i)
      memcpy(state + (size_t(panel) * z.Kp + i) * P, src + size_t(i) * z.V + panel * P, size_t(z.columns(panel)) * 4);
}

void write_state(const float* state, const Size& z, const Task& t, float* dst) {
  for (int panel = t.first; panel < t.last; ++panel)
    for (int i = 0; i < z.K; ++i)
      memcpy(dst + size_t(i) * z.V + panel * P, state + (size_t(panel) * z.Kp + i) * P, size_t(z.columns(panel)) * 4);
}

void copy_state(const float* src, const Size& z, const Task& t, float* dst) {
  const size_t panel = size_t(z.Kp) * P;
  memcpy(dst + t.first * panel, src + t.first * panel, (t.last - t.first) * panel * 4);
}

int64_t blocks_of(const Task& t) { return (t.end - t.begin + C * BLOCK - 1) / (C * BLOCK); }
int64_t chunks_of(const Task& t) { return (t.end - t.begin + C - 1) / C; }

// State slots: a state before every block of a sequence but the first. A sequence that starts at token a owns the
// slots from a / 64 on; since floor(a/64) + ceil(n/64) - 1 <= floor((a+n)/64), none overlap. Error slots: one for
// every chunk, from a / 16 + (the sequence's number) on, likewise.
float* state_slot(const Saved& saved, const Problem& p, const Size& z, const Task& t, int64_t block) {
  return saved.states + ((t.begin / (C * BLOCK) + block - 1) * p.HV + t.head) * z.state();
}

float* error_slot(const Saved& saved, const Problem& p, const Size& z, const Task& t, int64_t chunk) {
  return saved.errors + ((t.begin / C + t.sequence + chunk) * p.HV + t.head) * z.errors();
}

// Slots between this sequence's last and the next one's first: at most one of each kind.
void clear_unused(const Saved& saved, const Problem& p, const Size& z, const Task& t) {
  if (t.part) return;
  const int64_t last_block = t.end / (C * BLOCK) - t.begin / (C * BLOCK);
  for (int64_t block = blocks_of(t) > 1 ? blocks_of(t) : 1; block <= last_block; ++block)
    memset(state_slot(saved, p, z, t, block), 0, z.state() * 4);
  for (int64_t chunk = chunks_of(t); chunk <= t.end / C - t.begin / C; ++chunk)
    memset(error_slot(saved, p, z, t, chunk), 0, z.errors() * 4);
}

int64_t state_at(const Problem& p, const Task& t) { return (t.sequence * p.HV + t.head) * p.K * p.V; }

// One thread reads several heads in turn, a block of tokens of each: a row of q, k or v then serves all of them while
// its pages and cache lines are at hand, instead of once per pass over the sequence.
struct Group {
  Task tasks[GROUP];
  int count;
};

// The 16 tokens a group comes to after those of task `i` from `token` on, a block being walked forwards.
void add_next(const Problem& p, const Group& group, int i, int64_t token, Ahead& ahead) {
  const Task& t = group.tasks[i];
  const bool last = (token - t.begin) % (C * BLOCK) == C * (BLOCK - 1) || token + C >= t.end;
  if (!last) return add_inputs(p, t, token + C, ahead);
  const int64_t block = t.begin + (token - t.begin) / (C * BLOCK) * (C * BLOCK);
  if (i + 1 < group.count) add_inputs(p, group.tasks[i + 1], block, ahead);
  else add_inputs(p, group.tasks[0], block + C * BLOCK, ahead);
}

void forward_block(const Problem& p, const Size& z, const Group& group, int i, int64_t block, Chunk& c, Recurrence& rec,
                   float* state, float* predicted, float* v, void* o, const Saved& saved, Ahead& ahead) {
  const Task& t = group.tasks[i];
  if (saved.states && block) copy_state(state, z, t, state_slot(saved, p, z, t, block));
  const int64_t end = block * BLOCK + BLOCK < chunks_of(t) ? block * BLOCK + BLOCK : chunks_of(t);
  for (int64_t chunk = block * BLOCK; chunk < end; ++chunk) {
    float* errors = saved.errors ? error_slot(saved, p, z, t, chunk) : nullptr;
    prepare<false>(p, z, t, t.begin + chunk * C, c, rec);
    ahead.clear();
    add_next(p, group, i, c.token, ahead);
    ahead.spread_over(predict_depth(z) + advance_depth(z));
    for (int panel = t.first; panel < t.last; ++panel) {
      float* s = state + size_t(panel) * z.Kp * P;
      read_panel(p.v, p.v_type, p, z, t, c, panel, v);
      predict(z, c, rec, s, predicted, ahead);
      correct(c, predicted, v, errors ? errors + panel * C * P : nullptr, c.vt);
      write_panel(o, p.v_type, p, z, t, c, panel, v);
      advance(z, c, rec, s, c.vt, s, ahead);
    }
  }
}

void forward_group(const Problem& p, const Size& z, const Group& group, Arena& arena, void* o, float* final_state,
                   const Saved& saved) {
  arena.reserve(Chunk::floats(z) + Recurrence::floats(z) + group.count * z.state() + 3 * C * P);
  Chunk c;
  Recurrence rec;
  Ahead ahead;
  c.place(arena, z), rec.place(arena, z);
  float *states = arena.take(group.count * z.state()), *predicted = arena.take(2 * C * P), *v = arena.take(C * P);
  for (int i = 0; i < group.count; ++i) {
    const Task& t = group.tasks[i];
    read_state(p.initial_state ? p.initial_state + state_at(p, t) : nullptr, z, t, states + i * z.state());
  }
  for (int64_t block = 0; block < blocks_of(group.tasks[0]); ++block)
    for (int i = 0; i < group.count; ++i)
      forward_block(p, z, group, i, block, c, rec, states + i * z.state(), predicted, v, o, saved, ahead);
  for (int i = 0; i < group.count; ++i) {
    const Task& t = group.tasks[i];
    write_state(states + i * z.state(), z, t, final_state + state_at(p, t));
    if (saved.errors) clear_unused(saved, p, z, t);
  }
}

// What the backward pass of one chunk needs besides the chunk itself.
struct Scratch {
  float *d_state;              // (panels, Kp, P), the task's own
  float *dhat_t, *dend_t;      // (Kp, 2C), (Kp, C)
  float *dpair;                // (2C, C): dL over dM
  float *dbeta, *dtotal;       // (C, W), (Kp, W): to be summed over W
  float *rows;                 // (2C, P): [-b dY ; dO]
  float *dy;                   // (2C, P): [-dY ; dO]
  float *dy_t, *vt_t;          // (P, 2C), (P, C)
  float *dvt, *v;              // (C, P)
  float* across;               // (3C, Kp): pair gradients
  float *dhat, *dend, *out;    // (2C, Kp), (C, Kp), (3C, Kp)

  static size_t floats(const Size& z) {
    return size_t(12) * C * z.Kp + z.Kp * W + C * W + 2 * C * C + 9 * size_t(C) * P;
  }

  void place(Arena& arena, const Size& z) {
    size_t rows16 = size_t(C) * z.Kp;
    dhat_t = arena.take(2 * rows16), dend_t = arena.take(rows16);
    dpair = arena.take(2 * C * C), dbeta = arena.take(C * W), dtotal = arena.take(z.Kp * W);
    rows = arena.take(2 * C * P), dy = arena.take(2 * C * P), dy_t = arena.take(2 * C * P), vt_t = arena.take(C * P);
    dvt = arena.take(C * P), v = arena.take(C * P);
    across = arena.take(3 * rows16);
    dhat = arena.take(2 * rows16), dend = arena.take(rows16), out = arena.take(3 * rows16);
  }
};

// Of one vector: -dY and -dX for the products to come, dX = dV, and b's part.
INLINE void keep_solved(const Chunk& c, const float* x, int i, int col, vf y, Scratch& s) {
  const int at = i * P + col;
  vf dx = y * c.beta[i];
  store(s.dbeta + i * W, load(s.dbeta + i * W) + y * load(x + at));
  store(s.dy + at, -y);
  store(s.rows + at, -dx);
  store(s.rows + C * P + at, load(s.dy + C * P + at));
  store(s.v + at, dx);
}

// dVt = M^T dO + end dS;  (I + L)^T dY = dVt by substitution from the last token;  dX = b dY.
void solve_transposed(const Chunk& c, const float* x, const float* d_vt, Scratch& s) {
  const float* d_o = s.dy + C * P;
  for (int col = 0; kWide && col < P; col += W) {
    vf y[C];
    UNROLL
    for (int i = 0; i < C; ++i) y[i] = load(d_vt + i * P + col);
    UNROLL
    for (int j = 0; j < C; ++j) {
      vf d = load(d_o + j * P + col);
      UNROLL
      for (int i = 0; i <= j; ++i) y[i] += splat(c.m[j * C + i]) * d;
    }
    UNROLL
    for (int j = C - 1; j >= 0; --j)
      UNROLL
      for (int i = 0; i < j; ++i) y[i] -= splat(c.l[j * C + i]) * y[j];
    UNROLL
    for (int i = 0; i < C; ++i) keep_solved(c, x, i, col, y[i], s);
  }
  for (int col = 0; !kWide && col < P; col += 4 * W)
    for (int i = C - 1; i >= 0; --i) {
      vf y[4], later[4] = {};
      UNROLL
      for (int v = 0; v < 4; ++v)
        y[v] = load(d_vt + i * P + col + v * W) + load(d_o + i * P + col + v * W) * c.m[i * C + i];
      for (int j = i + 1; j < C; ++j) {
        vf l = splat(c.l[j * C + i]), m = splat(c.m[j * C + i]);
        UNROLL
        for (int v = 0; v < 4; ++v) {
          const int at = j * P + col + v * W;
          y[v] += m * load(d_o + at), later[v] += l * load(s.dy + at);
        }
      }
      UNROLL
      for (int v = 0; v < 4; ++v) keep_solved(c, x, i, col + v * W, y[v] + later[v], s);
    }
}

// Everything of the chunk's chain rule that touches one panel of the state.
void backward_panel(const Problem& p, const Size& z, const Task& t, const Gradients& g, const Chunk& c, int panel,
                    const float* state, Scratch& s, Ahead& ahead) {
  const float *x = c.x + panel * C * P, *vt = c.vt + panel * C * P;
  float* d_state = s.d_state + size_t(panel) * z.Kp * P;
  read_panel(g.d_o, p.v_type, p, z, t, c, panel, s.dy + C * P);
  product<P>(
      C, z.Kp, c.end_t, 1, C, d_state, P, [&](int r, int q, vf acc) { store(s.dvt + r * P + q, acc); }, ahead);
  solve_transposed(c, x, s.dvt, s);
  write_panel(g.dv, p.v_type, p, z, t, c, panel, s.v);
  transpose(s.dy, P, 2 * C, P, s.dy_t, 2 * C);
  transpose(vt, P, C, P, s.vt_t, C);
  auto add_to = [](float* base, int stride) {
    return [=](int r, int q, vf acc) { store(base + r * stride + q, load(base + r * stride + q) + acc); };
  };
  product<C>(2 * C, P, s.dy_t, 1, 2 * C, s.vt_t, C, add_to(s.dpair, C));
  product<C>(z.Kp, P, d_state, P, 1, s.vt_t, C, add_to(s.dend_t, C), ahead);
  product<2 * C>(z.Kp, P, state, P, 1, s.dy_t, 2 * C, add_to(s.dhat_t, 2 * C), ahead);
  product<P>(
      z.Kp, 2 * C, c.hat, 1, z.Kp, s.rows, P,
      [&](int r, int q, vf acc) {
        vf d = load(d_state + r * P + q);
        store(s.dtotal + r * W, load(s.dtotal + r * W) + load(state + r * P + q) * d);
        store(d_state + r * P + q, d * c.total[r] + acc);
      },
      ahead);
}

// Steps of those products, for a chunk.
int backward_depth(const Size& z) { 
  const int columns = tile_columns(P);
  return z.panels * z.Kp * (C * P / columns + P * C / tile_columns(C) + P * 2 * C / tile_columns(2 * C) + 2 * C * P / columns) / kTileRows;
}

int64_t gradient_row(const Problem& p, const Task& t, int64_t token) {
  return (token * p.HV + t.head) * p.parts + t.part;
}

// dO of a chunk and where its gradients go.
void add_outputs(const Problem& p, const Task& t, const Gradients& g, const Chunk& c, Ahead& ahead) {
  for (int64_t i = c.token; i < c.token + c.count; ++i) {
    const int64_t row = i * p.HV + t.head;
    const int64_t key_row = gradient_row(p, t, i) * p.K;
    ahead.add(g.d_o, row * p.V, p.v_type, int(p.V));
    ahead.add(g.dv, row * p.V, p.v_type, int(p.V));
    ahead.add(g.dq, key_row, g.dq_type, int(p.K));
    ahead.add(g.dk, key_row, g.dk_type, int(p.K));
    ahead.add(g.dlog_decay, key_row, g.dlog_decay_type, int(p.K));
  }
}

// From dL to dN and beta's part, in place; dM stays as it is.
void through_beta(const Chunk& c, Scratch& s) {
  for (int i = 0; i < C; ++i)
    for (int j = 0; j < i; ++j) {
      float& d = s.dpair[i * C + j];
      s.dbeta[i * W] += d * c.n[i * C + j];
      d *= c.beta[i];
    }
}

// Gradients of keys and queries through N and M, pairs i > j only:
//   across = [sum_j dN_ij D_ij k_j ; sum_j dM_ij D_ij k_j ; sum_i D_ij (dN_ij k_i + s dM_ij q_i)]
// by Horner's rule: D_ij k_j summed over j is (... (k_0 e_1 + k_1) e_2 + ...) e_i. Four rows, then four columns.
void backward_pairs(const Problem& p, const Size& z, const Chunk& c, const float* dn, float* across) {
  const int Kp = z.Kp;
  const float* dm = dn + C * C;
  for (int col = 0; col < Kp; col += W) {
    const float *k = c.k + col, *q = c.q + col, *decay = c.decay + col;
    for (int row = 0; row < C; row += 4) {
      vf rk[4] = {}, rq[4] = {};
      auto add = [&](int j, int r, vf key, vf e) {
        rk[r] = (rk[r] + key * dn[(row + r) * C + j]) * e;
        rq[r] = (rq[r] + key * dm[(row + r) * C + j]) * e;
      };
      for (int j = 0; j < row; ++j) {
        vf key = load(k + j * Kp), e = load(decay + (j + 1) * Kp);
        UNROLL
        for (int r = 0; r < 4; ++r) add(j, r, key, e);
      }
      UNROLL
      for (int d = 0; d < 3; ++d) {
        vf key = load(k + (row + d) * Kp), e = load(decay + (row + d + 1) * Kp);
        UNROLL
        for (int r = d + 1; r < 4; ++r) add(row + d, r, key, e);
      }
      UNROLL
      for (int r = 0; r < 4; ++r) {
        store(across + (row + r) * Kp + col, rk[r]);
        store(across + (C + row + r) * Kp + col, rq[r]);
      }
    }
    for (int j = 0; j < C; j += 4) {
      vf column[4] = {};
      auto add = [&](int i, int r, vf key, vf query, vf e) {
        column[r] = (column[r] + key * dn[i * C + j + r] + query * dm[i * C + j + r]) * e;
      };
      for (int i = C - 1; i >= j + 4; --i) {
        vf key = load(k + i * Kp), query = load(q + i * Kp) * p.scale, e = load(decay + i * Kp);
        UNROLL
        for (int r = 0; r < 4; ++r) add(i, r, key, query, e);
      }
      UNROLL
      for (int d = 3; d > 0; --d) {
        vf key = load(k + (j + d) * Kp), query = load(q + (j + d) * Kp) * p.scale, e = load(decay + (j + d) * Kp);
        UNROLL
        for (int r = 0; r < d; ++r) add(j + d, r, key, query, e);
      }
      UNROLL
      for (int r = 0; r < 4; ++r) store(across + (2 * C + j + r) * Kp + col, column[r]);
    }
  }
}

// dq, dk, dg of a chunk from the parts, into s.out (3C, Kp). A gate at token r acts on pairs i >= r > j only:
// a sum from the end over row minus column terms, one from the start over what reaches the final state.
void backward_keys(const Problem& p, const Size& z, const Chunk& c, Scratch& s) {
  const int Kp = z.Kp, rows = C * Kp;
  for (int col = 0; col < Kp; col += W) {
    float through_state[W];
    for (int j = 0; j < W; ++j) through_state[j] = sum(load(s.dtotal + (col + j) * W));
    vf dg = load(c.total + col) * load(through_state), kept = {};
    UNROLL
    for (int i = 0; i < C; ++i) {
      int at = i * Kp + col;
      vf to_end = load(c.F + at) * load(s.dend + at);
      store(s.out + 2 * rows + at, kept);
      kept += load(c.k + at) * to_end;
      store(s.out + rows + at, to_end);
    }
    UNROLL
    for (int i = C - 1; i >= 0; --i) {
      int at = i * Kp + col;
      vf k = load(c.k + at), q = load(c.q + at), E = load(c.E + at);
      vf dq = (E * load(s.dhat + rows + at) + load(s.across + rows + at)) * p.scale;
      vf row = E * (load(s.dhat + at) * c.beta[i]) + load(s.across + at), column = load(s.across + 2 * rows + at);
      float diagonal = p.scale * s.dpair[(C + i) * C + i];
      dg += q * dq + k * (row - column);
      store(s.out + 2 * rows + at, load(s.out + 2 * rows + at) + dg);
      store(s.out + at, dq + k * diagonal);
      store(s.out + rows + at, load(s.out + rows + at) + row + column + q * diagonal);
    }
  }
}

void write_gradients(const Problem& p, const Size& z, const Task& t, const Gradients& g, const Chunk& c, Scratch& s) {
  for (int i = 0; i < c.count; ++i) {
    int64_t row = gradient_row(p, t, c.token + i);
    write_row(g.dq, row * p.K, g.dq_type, z.K, s.out + i * z.Kp);
    write_row(g.dk, row * p.K, g.dk_type, z.K, s.out + (C + i) * z.Kp);
    write_row(g.dlog_decay, row * p.K, g.dlog_decay_type, z.K, s.out + (2 * C + i) * z.Kp);
    write_one(g.dbeta, row, g.dbeta_type, sum(load(s.dbeta + i * W)));
  }
}

void backward_chunk(const Problem& p, const Size& z, const Task& t, const Gradients& g, const Chunk& c,
                    const float* state, Scratch& s, Ahead& ahead) {
  memset(s.dhat_t, 0, size_t(2) * C * z.Kp * 4), memset(s.dend_t, 0, size_t(C) * z.Kp * 4);
  memset(s.dpair, 0, 2 * C * C * 4), memset(s.dbeta, 0, C * W * 4), memset(s.dtotal, 0, size_t(z.Kp) * W * 4);
  for (int panel = t.first; panel < t.last; ++panel)
    backward_panel(p, z, t, g, c, panel, state + size_t(panel) * z.Kp * P, s, ahead);
  transpose(s.dhat_t, 2 * C, z.Kp, 2 * C, s.dhat, z.Kp);
  transpose(s.dend_t, C, z.Kp, C, s.dend, z.Kp);
  through_beta(c, s);
  backward_pairs(p, z, c, s.dpair, s.across);
  backward_keys(p, z, c, s);
  write_gradients(p, z, t, g, c, s);
}

// Chunks of one block with the state before each: states[i] leads to states[i + 1].
void recompute(const Problem& p, const Size& z, const Task& t, const Gradients& g, const Saved& saved, int64_t first,
               int count, Chunk* chunks, Recurrence& rec, float* states, Ahead& ahead) {
  for (int i = 0; i < count; ++i) {
    Chunk& c = chunks[i];
    prepare<true>(p, z, t, t.begin + (first + i) * C, c, rec);
    c.x = error_slot(saved, p, z, t, first + i);
    ahead.clear();
    if (i + 1 < count) add_inputs(p, t, c.token + C, ahead);
    else add_outputs(p, t, g, c, ahead);
    ahead.spread_over(advance_depth(z));
    for (int panel = t.first; panel < t.last; ++panel) {
      float *state = states + i * z.state() + size_t(panel) * z.Kp * P, *vt = c.vt + panel * C * P;
      correct_again(c, c.x + panel * C * P, vt);
      if (i + 1 < count) advance(z, c, rec, state, vt, state + z.state(), ahead);
    }
  }
}

void backward_block(const Problem& p, const Size& z, const Group& group, int n, int64_t block, Chunk* chunks,
                    float* states, Recurrence& rec, const Gradients& g, const Saved& saved, Scratch& s, Ahead& ahead) {
  const Task& t = group.tasks[n];
  const int64_t first = block * BLOCK, left = chunks_of(t) - first;
  const int count = int(left < BLOCK ? left : BLOCK);
  if (block)
    copy_state(state_slot(saved, p, z, t, block), z, t, states);
  else
    read_state(p.initial_state ? p.initial_state + state_at(p, t) : nullptr, z, t, states);
  recompute(p, z, t, g, saved, first, count, chunks, rec, states, ahead);
  for (int i = count - 1; i >= 0; --i) {
    ahead.clear();
    if (i) add_outputs(p, t, g, chunks[i - 1], ahead);
    else if (n + 1 < group.count) add_inputs(p, group.tasks[n + 1], chunks[0].token, ahead);
    else add_inputs(p, group.tasks[0], chunks[0].token - BLOCK * C, ahead);
    ahead.spread_over(backward_depth(z));
    backward_chunk(p, z, t, g, chunks[i], states + i * z.state(), s, ahead);
  }
}

void backward_group(const Problem& p, const Size& z, const Group& group, Arena& arena, const Gradients& g,
                    const Saved& saved) {
  arena.reserve(BLOCK * Chunk::floats(z) + (BLOCK + group.count) * z.state() + Recurrence::floats(z) +
                Scratch::floats(z));
  Chunk chunks[BLOCK];
  for (Chunk& c : chunks) c.place(arena, z);
  float *states = arena.take(BLOCK * z.state()), *d_states = arena.take(group.count * z.state());
  Recurrence rec;
  Scratch s;
  Ahead ahead;
  rec.place(arena, z), s.place(arena, z);
  for (int n = 0; n < group.count; ++n)
    read_state(g.d_final ? g.d_final + state_at(p, group.tasks[n]) : nullptr, z, group.tasks[n],
               d_states + n * z.state());
  for (int64_t block = blocks_of(group.tasks[0]) - 1; block >= 0; --block)
    for (int n = 0; n < group.count; ++n) {
      s.d_state = d_states + n * z.state();
      backward_block(p, z, group, n, block, chunks, states, rec, g, saved, s, ahead);
    }
  for (int n = 0; g.d_initial && n < group.count; ++n)
    write_state(d_states + n * z.state(), z, group.tasks[n], g.d_initial + state_at(p, group.tasks[n]));
}

// Groups a sequence's heads are dealt into: few, but as much work for one thread as for another.
int64_t groups_of(const Problem& p) {
  int64_t groups = (p.HV + GROUP - 1) / GROUP;
  auto even = [&] {
    const int64_t pieces = groups * p.parts * (p.offsets ? 1 : p.sequences);
    return pieces % p.threads == 0 || pieces >= 4 * p.threads;
  };
  while (groups < p.HV && !even()) ++groups;
  return groups;
}

// Runs every (sequence, value head, part) once, in groups. Tasks write disjoint memory in a fixed order each, so the
// result depends neither on the number of threads nor on the grouping.
template <class Run>
void for_each_group(const Problem& p, const Size& z, Run run) {
  const int64_t groups = groups_of(p), pieces = p.sequences * p.parts * groups;
  if (!pieces) return;
  const int threads = int(p.threads < pieces ? p.threads : pieces);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < pieces; ++i) {
    static thread_local Arena arena;
    const int64_t n = i / groups / p.parts, part = i / groups % p.parts, head = p.HV * (i % groups) / groups;
    const int64_t begin = p.offsets ? p.offsets[n] : n * p.tokens, end = p.offsets ? p.offsets[n + 1] : begin + p.tokens;
    const int first = int(z.panels * part / p.parts), last = int(z.panels * (part + 1) / p.parts);
    Group group;
    group.count = int(p.HV * (i % groups + 1) / groups - head);
    for (int h = 0; h < group.count; ++h)
      group.tasks[h] = Task{n, head + h, (head + h) / (p.HV / p.H), begin, end, part, first, last};
    run(group, arena);
  }
}

// NV vectors of value columns of one head's decode step: p = (a S)^T k and r = (a S)^T q in one reading of S,
// then e = b (v - p), o = s (r + (q.k) e), S <- a S + k e^T, into `after`, which may be the state itself.
template <int NV>
INLINE void step_columns(int K, int64_t V, const float* state, float* after, const float* a, const float* k, const float* q, const float* v,
                         float beta, float qk, float scale, float* o) {
  vf p[NV], r[NV];
  UNROLL
  for (int j = 0; j < NV; ++j) p[j] = r[j] = vf{};
  for (int i = 0; i < K; ++i) {
    vf ki = splat(a[i] * k[i]), qi = splat(a[i] * q[i]);
    UNROLL
    for (int j = 0; j < NV; ++j) {
      vf s = load(state + i * V + j * W);
      p[j] += s * ki;
      r[j] += s * qi;
    }
  }
  UNROLL
  for (int j = 0; j < NV; ++j) {
    p[j] = (load(v + j * W) - p[j]) * beta;
    store(o + j * W, (r[j] + p[j] * qk) * scale);
  }
  for (int i = 0; i < K; ++i) {
    vf ai = splat(a[i]), ki = splat(k[i]);
    UNROLL
    for (int j = 0; j < NV; ++j) {
      const int64_t at = i * V + j * W;
      store(after + at, load(state + at) * ai + ki * p[j]);
    }
  }
}

// The same for one column, where V is no multiple of the vector width.
void step_column(int K, int64_t V, const float* state, float* after, const float* a, const float* k, const float* q,
                 float v, float beta, float qk, float scale, float* o) {
  float p = 0, r = 0;
  for (int i = 0; i < K; ++i) {
    p += state[i * V] * (a[i] * k[i]);
    r += state[i * V] * (a[i] * q[i]);
  }
  float e = (v - p) * beta;
  *o = (r + e * qk) * scale;
  for (int i = 0; i < K; ++i) after[i * V] = state[i * V] * a[i] + k[i] * e;
}

void step_task(const Problem& p, const Size& z, const Task& t, Arena& arena, const float* states, float* after,
               void* o) {
  arena.reserve(3 * size_t(z.Kp) + 2 * size_t(z.panels) * P);
  float *a = arena.take(z.Kp), *k = arena.take(z.Kp), *q = arena.take(z.Kp);
  float *v = arena.take(size_t(z.panels) * P), *out = arena.take(size_t(z.panels) * P);
  const int64_t row = t.sequence * p.HV + t.head, key_row = t.sequence * p.H + t.key_head;
  const int first = t.first * P, columns = (t.last * P < z.V ? t.last * P : z.V) - first;
  read_row(p.k, key_row * p.K, p.k_type, z.K, z.Kp, k);
  read_row(p.q, key_row * p.K, p.q_type, z.K, z.Kp, q);
  read_row(p.log_decay, row * p.K, p.log_decay_type, z.K, z.Kp, a);
  read_row(p.v, row * p.V + first, p.v_type, columns, columns, v);
  vf dot = {};
  for (int i = 0; i < z.Kp; i += W) {
    store(a + i, exp_nonpositive(load(a + i)));
    dot += load(k + i) * load(q + i);
  }
  const float beta = read_one(p.beta, row, p.beta_type), qk = sum(dot);
  const float* from = states + state_at(p, t) + first;
  float* to = after + state_at(p, t) + first;
  int col = 0;
  for (; col + 8 * W <= columns; col += 8 * W)
    step_columns<8>(z.K, z.V, from + col, to + col, a, k, q, v + col, beta, qk, p.scale, out + col);
  for (; col + 2 * W <= columns; col += 2 * W)
    step_columns<2>(z.K, z.V, from + col, to + col, a, k, q, v + col, beta, qk, p.scale, out + col);
  for (; col + W <= columns; col += W)
    step_columns<1>(z.K, z.V, from + col, to + col, a, k, q, v + col, beta, qk, p.scale, out + col);
  for (; col < columns; ++col)
    step_column(z.K, z.V, from + col, to + col, a, k, q, v[col], beta, qk, p.scale, out + col);
  write_row(o, row * p.V + first, p.v_type, columns, out);
}

}  // namespace

extern "C" {

// o (tokens, HV, V), final_state (N, HV, K, V).
void kda_forward(const Problem* p, void* o, float* final_state, float* states, float* errors) {
  const Size z(*p);
  const Saved saved{states, errors};
  for_each_group(*p, z, [&](const Group& g, Arena& arena) { forward_group(*p, z, g, arena, o, final_state, saved); });
}

void kda_backward(const Problem* p, const Gradients* g, float* states, float* errors) {
  const Size z(*p);
  const Saved saved{states, errors};
  for_each_group(*p, z, [&](const Group& heads, Arena& arena) { backward_group(*p, z, heads, arena, *g, saved); });
}

// One token of every sequence: from `state` to `after` (N, HV, K, V), which may be the same memory; o is (N, HV, V).
void kda_step(const Problem* p, const float* state, float* after, void* o) {
  const Size z(*p);
  for_each_group(*p, z, [&](const Group& heads, Arena& arena) {
    for (int i = 0; i < heads.count; ++i) step_task(*p, z, heads.tasks[i], arena, state, after, o);
  });
}

}  // extern "C"

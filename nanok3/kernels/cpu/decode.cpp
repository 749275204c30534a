// A whole K3 for a few tokens in one call: embedding, all layers, final norm, logits. For decoding, where the work is
// reading the weights once and everything between two products is small.
//
// Rows are tokens of any number of sequences, each with its own memory. A phase is one set of products, or what happens
// between two of them; the threads of a team share its pieces and meet after it. All arithmetic is float32; weights are
// read in the type they are stored in, and nothing is rounded but latents that are kept as bf16.
#include "decode_kda.h"
#include "decode_mla.h"
#include "decode_moe.h"

namespace {

class Decoder {
 public:
  Decoder(const Call& call, Member& team)
      : c_(call), m_(*call.model), b_(m_, call.capacity, call.workspace), N_(call.rows), team_(team), depth_(m_, b_, call.capacity) {}

  void run(const Chain* chain = nullptr) {
    if (chain) combine(*chain);
    else embed();
    int64_t kda = 0, mla = 0;
    for (int64_t i = 0; i < m_.layer_count; ++i) {
      const Layer& l = m_.layers[i];
      read_depth(l.attention_mix_norm, l.attention_mix_query, l.input_norm, false, i);
      if (m_.block < 0 || (m_.block && i % m_.block == 0)) depth_.close();
      if (l.is_mla) attend(l, mla++);
      else remember(l, kda++);
      read_depth(l.mlp_mix_norm, l.mlp_mix_query, l.post_norm, false);
      if (m_.block < 0) depth_.close();
      feed(l);
    }
    read_depth(m_.final_mix_norm, m_.final_mix_query, m_.final_norm, true, m_.layer_count);
    finish();
  }

 private:
  void embed() {
    team_.share(N_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        read_row(m_.embedding.data, c_.ids[r] * m_.hidden, Type(m_.embedding.format), int(m_.hidden), int(m_.hidden), depth_.running(r));
    });
  }

  // The block's input: combine [norm(embedding) ; norm(feature before)].
  void combine(const Chain& chain) {
    const int64_t D = m_.hidden, stride = padded(2 * D);
    team_.share(N_, 1, [&](int64_t begin, int64_t end) {
      float* token = scratch(size_t(3 * D));
      const float *token_norm = chain.token_norm.floats(0, D, token + D), *norm = chain.feature_norm.floats(0, D, token + 2 * D);
      for (int64_t r = begin; r < end; ++r) {
        float* joined = chain.workspace + r * stride;
        read_row(chain.table.data, c_.ids[r] * D, Type(chain.table.format), int(D), int(D), token);
        rms_norm(token, D, token_norm, m_.eps, joined);
        rms_norm(chain.features + r * D, D, norm, m_.eps, joined + D);
      }
    });
    team_.share(D, kPiece, [&](int64_t begin, int64_t end) {
      dot_rows(chain.combine, 0, begin, end, N_, [&](int64_t r) { return chain.workspace + r * stride; },
               [&](int64_t r) { return depth_.running(r); });
    });
  }

  // x = norm(read(depth)) for every row; what was read is kept where `place` is tapped.
  void read_depth(const Vector& mix_norm, const Vector& mix_query, const Vector& norm, bool last, int64_t place = -1) {
    team_.share(N_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        float* x = b_.x + r * b_.hidden;
        const float* h = depth_.read(r, mix_norm, mix_query, last, x);
        for (int64_t t = 0; t < c_.tap_count; ++t)
          if (c_.tapped[t] == place) memcpy(c_.taps + (r * c_.tap_count + t) * m_.hidden, h, size_t(m_.hidden) * 4);
        rms_norm(h, m_.hidden, norm.floats(0, m_.hidden, scratch(size_t(m_.hidden))), m_.eps, x);
      }
    });
  }

  // Adds the product of rows (and of others, if there is a second matrix; else their sums as they are) to the running sum.
  void add(const Matrix& first, const float* x, int64_t x_stride, const Matrix* second, const float* y, int64_t y_stride) {
    const bool fresh = depth_.fresh();
    team_.share(m_.hidden, kPiece, [&](int64_t begin, int64_t end) {
      auto running = [&](int64_t r) { return depth_.running(r); };
      bool over = fresh;
      if (first) dot_rows(first, 0, begin, end, N_, [&](int64_t r) { return x + r * x_stride; }, running, !over), over = false;
      if (second && *second)
        dot_rows(*second, 0, begin, end, N_, [&](int64_t r) { return y + r * y_stride; }, running, !over), over = false;
      if (!first)
        for (int64_t r = 0; r < N_; ++r)
          for (int64_t o = begin; o < end; ++o) {
            float* p = depth_.running(r) + o;
            *p = over ? x[r * x_stride + o] : *p + x[r * x_stride + o];
          }
    });
    depth_.added();
  }

  // f(sequence, its first row) for each sequence and each of `parts` parts of the work on it.
  template <class Run>
  void for_sequences(int64_t parts, Run run) {
    team_.share(c_.sequence_count * parts, 1, [&](int64_t begin, int64_t end) {
      int64_t row = 0, s = 0;
      for (int64_t i = begin; i < end; ++i) {
        for (; s < i / parts; ++s) row += c_.sequences[s]->rows;
        run(*c_.sequences[s], row, i % parts);
      }
    });
  }

  void remember(const Layer& l, int64_t layer) {
    const int64_t D = b_.hidden, inner = b_.inner;
    multiply_all(team_, N_,
                 {{l.q, b_.x, D, b_.qkv, 3 * inner},
                  {l.k, b_.x, D, b_.qkv + inner, 3 * inner},
                  {l.v, b_.x, D, b_.qkv + 2 * inner, 3 * inner},
                  {l.g_a ? l.g_a : l.g_b, b_.x, D, l.g_a ? b_.g_a : b_.kda_gate, l.g_a ? b_.f : inner},
                  {l.f_a, b_.x, D, b_.f_a, b_.f},
                  {l.b, b_.x, D, b_.beta, m_.kda_heads}});
    const Matrix none{};
    multiply_all(team_, N_, {{l.f_b, b_.f_a, b_.f, b_.decay, inner}, {l.g_a ? l.g_b : none, b_.g_a, b_.f, b_.kda_gate, inner}});
    for_sequences(m_.kda_heads, [&](const Sequence& s, int64_t row, int64_t h) { kda::head(m_, l, b_, s, row, layer, h); });
    add(l.o, b_.kda_out, b_.kda_width, nullptr, nullptr, 0);
  }

  void attend(const Layer& l, int64_t layer) {
    const int64_t D = b_.hidden, q_width = m_.mla_heads * (m_.nope + m_.rope);
    const Matrix none{};
    multiply_all(team_, N_,
                 {{m_.q_rank ? l.q_a : l.q_b, b_.x, D, m_.q_rank ? b_.q_a : b_.q, m_.q_rank ? b_.q_rank : q_width},
                  {l.kv_a, b_.x, D, b_.kv, m_.rank + m_.rope},
                  {l.g_b, b_.x, D, b_.mla_gate, m_.mla_heads * m_.v_dim}});
    for_sequences(1, [&](const Sequence& s, int64_t row, int64_t) {
      for (int64_t r = 0; r < s.rows; ++r) mla::keep_row(m_, l, b_, s, row, r, layer);
    });
    multiply_all(team_, N_, {{m_.q_rank ? l.q_b : none, b_.q_a, b_.q_rank, b_.q, q_width}});
    team_.share(m_.mla_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t h = begin; h < end; ++h) mla::absorb(m_, l, b_, N_, h);
    });
    const int64_t parts = (m_.mla_heads + mla::kHeads - 1) / mla::kHeads;
    for_rows(parts, [&](const Sequence& s, int64_t row, int64_t r, int64_t part) {
      with_type(Type(s.latent_type), [&](auto type) {
        mla::attend<decltype(type)>(m_, b_, s, row, r, layer, part * mla::kHeads);
      });
    });
    team_.share(m_.mla_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t h = begin; h < end; ++h) mla::values(m_, l, b_, N_, h);
    });
    add(l.o, b_.mla_out, b_.mla_width, nullptr, nullptr, 0);
  }

  // f(sequence, its first row, row of the sequence, part) for each row and each of `parts` parts of the work on it.
  template <class Run>
  void for_rows(int64_t parts, Run run) {
    team_.share(N_ * parts, 1, [&](int64_t begin, int64_t end) {
      int64_t row = 0, s = 0;
      for (int64_t i = begin; i < end; ++i) {
        while (i / parts >= row + c_.sequences[s]->rows) row += c_.sequences[s++]->rows;
        run(*c_.sequences[s], row, i / parts - row, i % parts);
      }
    });
  }

  void feed(const Layer& l) {
    if (!l.is_moe) {
      gated(l, b_.dense_gate, b_.dense_up, b_.dense, m_.intermediate);
      return add(l.down, b_.dense_gate, b_.dense, nullptr, nullptr, 0);
    }
    const int64_t D = b_.hidden;
    // Router, latent and shared experts all read x: one phase, but the shared pair needs its activation after it.
    multiply_all(team_, N_, {{l.router, b_.x, D, b_.scores, m_.experts}, {l.latent_down, b_.x, D, b_.z, b_.latent}});
    if (l.gate) gated(l, b_.shared_gate, b_.shared_up, b_.shared, m_.shared);
    const float* z = l.latent_down ? b_.z : b_.x;
    moe::routed(team_, m_, l, b_, N_, z, l.latent_down ? b_.latent : D);
    add(l.latent_up, b_.y, b_.latent, &l.down, b_.shared_gate, b_.shared);
  }

  void gated(const Layer& l, float* gate, float* up, int64_t stride, int64_t width) {
    team_.share(width, kPiece, [&](int64_t begin, int64_t end) {
      moe::gated(m_, l.gate, l.up, 0, begin, end, N_, [&](int64_t r) { return b_.x + r * b_.hidden; }, gate, up, stride);
    });
  }

  void finish() {
    if (c_.hidden)
      team_.share(N_, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) memcpy(c_.hidden + r * m_.hidden, b_.x + r * b_.hidden, size_t(m_.hidden) * 4);
      });
    if (!c_.logits) return;
    team_.share(m_.vocab, kPiece, [&](int64_t begin, int64_t end) {
      dot_rows(m_.head, 0, begin, end, c_.chosen_count, [&](int64_t r) { return b_.x + c_.chosen[r] * b_.hidden; },
               [&](int64_t r) { return c_.logits + r * m_.vocab; });
    });
  }

  const Call& c_;
  const Model& m_;
  const Buffers b_;
  const int64_t N_;
  Member& team_;
  Depth depth_;
};

// Where the largest of n numbers stands for the first time; -1 if one is NaN.
int64_t largest(const float* x, int64_t n) {
  float most = x[0];
  bool usable = true;
  for (int64_t i = 0; i < n; ++i) {
    usable &= x[i] == x[i];
    most = x[i] > most ? x[i] : most;
  }
  for (int64_t i = 0; usable && i < n; ++i)
    if (x[i] == most) return i;
  return -1;
}

// The calls of a chain, one a guess, made before any of them runs: the first reads the rows it was given, each later one
// a row of every sequence that wants more. What one has guessed is the next one's token, its h the feature before that.
class Links {
 public:
  Links(const Call& call, const Chain& chain) : chain_(chain), ids_(size_t(call.sequence_count)) {
    const int64_t count = chain.counts[0], D = call.model->hidden;
    float* room = chain.workspace + call.capacity * padded(2 * D);
    h_ = room, logits_ = room + call.sequence_count * D, last_.reserve(size_t(call.sequence_count));
    int64_t row = 0;
    for (int64_t s = 0; s < call.sequence_count; ++s) last_.push_back((row += call.sequences[s]->rows) - 1), first_.push_back(s);
    sequences_.reserve(size_t(count * call.sequence_count)), places_.reserve(sequences_.capacity());
    for (int64_t k = 0; k < count; ++k) {
      Call link = call;
      link.logits = logits_, link.chosen = k ? first_.data() : last_.data();
      link.sequences = places_.data() + places_.size();
      link.sequence_count = 0;
      for (int64_t s = 0; s < call.sequence_count && chain.counts[s] > k; ++s, ++link.sequence_count) {
        sequences_.push_back(*call.sequences[s]);
        Sequence& own = sequences_.back();
        if (k) own.tokens += own.rows + k - 1, own.rows = 1;
        places_.push_back(&own);
      }
      if (k) link.rows = link.sequence_count, link.ids = ids_.data();
      link.chosen_count = link.sequence_count;
      calls_.push_back(link);
    }
  }

  void run(Member& team) const {
    for (size_t k = 0; k < calls_.size(); ++k) {
      const Call& call = calls_[k];
      Chain own = chain_;
      if (k) own.features = h_;
      Decoder(call, team).run(&own);
      team.share(call.sequence_count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) say(call, s, int64_t(k));
      });
    }
  }

 private:
  void say(const Call& call, int64_t s, int64_t k) const {
    const int64_t D = call.model->hidden, guess = largest(logits_ + s * call.model->vocab, call.model->vocab);
    chain_.said[s * chain_.counts[0] + k] = guess;
    ids_[size_t(s)] = guess < 0 ? 0 : guess;  // of what follows a NaN nothing is used
    memcpy(h_ + s * D, call.taps + call.chosen[s] * D, size_t(D) * 4);
  }

  const Chain& chain_;
  float *h_, *logits_;
  mutable std::vector<int64_t> ids_;
  std::vector<int64_t> last_, first_;
  std::vector<Sequence> sequences_;
  std::vector<Sequence*> places_;
  std::vector<Call> calls_;
};

}  // namespace

extern "C" {

// Floats of workspace that calls of up to `rows` rows need.
int64_t decode_workspace(const Model* model, int64_t rows) { return Buffers(*model, rows, nullptr).size; }

// Reads all rows into their sequences' memory, and writes the logits of the chosen ones.
void decode(const Call* call) {
  Team::run(int(call->threads), [&](Member team) { Decoder(*call, team).run(); });
}

// Floats of workspace that chains of up to `rows` rows need beside a call's.
int64_t chain_workspace(const Model* model, int64_t rows) {
  return rows * (padded(2 * model->hidden) + model->hidden + model->vocab);
}

// Reads all rows and guesses on; the call's one tap is the last read.
void decode_chain(const Call* call, const Chain* chain) {
  const Links links(*call, *chain);
  Team::run(int(call->threads), [&](Member team) { links.run(team); });
}

// Moves the KDA memory of all sequences on by `rows` rows each of their tapes.
void decode_replay(const Call* call) {
  const int64_t heads = call->model->kda_heads;
  int64_t layers = 0;
  for (int64_t i = 0; i < call->model->layer_count; ++i) layers += !call->model->layers[i].is_mla;
  Team::run(int(call->threads), [&](Member team) {
    team.share(call->sequence_count * layers * heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) kda::replay(*call->model, *call->sequences[i / (layers * heads)], i / heads % layers, i % heads);
    });
  });
}

// Sizes of the records, to be compared with their mirror.
int64_t decode_record_size(int32_t which) {
  const int64_t sizes[] = {sizeof(Model), sizeof(Layer), sizeof(Sequence), sizeof(Call), sizeof(Chain)};
  return sizes[which];
}

}  // extern "C"

// Logits of a GGUF model in llama.cpp: token ids in, float32 rows out.
//
//   llama_logits MODEL.gguf IDS.txt OUT.f32 THREADS PREFILL
//
// IDS.txt holds numbers with blanks between them. The first PREFILL of them are read in one call, the others one by
// one, as in decoding. OUT.f32 gets a row of vocabulary size for each id. Latents are cached in float32 and attention is
// the plain one: flash attention, the default there, rounds on the way and is off by 1e-4 of the logits, the rest of the
// engine by 1e-6.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "llama.h"

namespace {

[[noreturn]] void fail(const char * what) {
    std::fprintf(stderr, "llama_logits: %s\n", what);
    std::exit(1);
}

// Reads ids[begin, end) of sequence 0 and appends their logits to out.
void step(llama_context * context, const std::vector<llama_token> & ids, int begin, int end, int rows, std::FILE * out) {
    llama_batch batch = llama_batch_init(end - begin, 0, 1);
    for (int i = begin; i < end; ++i) {
        const int at = batch.n_tokens++;
        batch.token[at] = ids[i];
        batch.pos[at] = i;
        batch.n_seq_id[at] = 1;
        batch.seq_id[at][0] = 0;
        batch.logits[at] = 1;
    }
    if (llama_decode(context, batch) != 0) fail("llama_decode refused a batch");
    for (int at = 0; at < batch.n_tokens; ++at) {
        const float * logits = llama_get_logits_ith(context, at);
        if (std::fwrite(logits, sizeof(float), rows, out) != static_cast<size_t>(rows)) fail("the file cannot be written");
    }
    llama_batch_free(batch);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 6) fail("expected MODEL.gguf IDS.txt OUT.f32 THREADS PREFILL");
    std::ifstream file(argv[2]);
    const std::vector<llama_token> ids{std::istream_iterator<llama_token>(file), {}};
    const int total = static_cast<int>(ids.size());
    const int prefill = std::min(std::atoi(argv[5]), total);
    if (prefill < 1) fail("there must be at least one id, and PREFILL must be at least 1");

    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) fail("the model cannot be loaded");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = total + 8;
    params.n_batch = total;
    params.n_threads = params.n_threads_batch = std::atoi(argv[4]);
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) fail("no context could be made");

    std::FILE * out = std::fopen(argv[3], "wb");
    if (!out) fail("the output cannot be opened");
    const int rows = llama_vocab_n_tokens(llama_model_get_vocab(model));
    step(context, ids, 0, prefill, rows, out);
    for (int i = prefill; i < total; ++i) step(context, ids, i, i + 1, rows, out);
    if (std::fclose(out) != 0) fail("the file cannot be written");
    llama_free(context);
    llama_model_free(model);
    llama_backend_free();
}

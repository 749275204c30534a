// llama.cpp as a contender of bench/inference.py: loads a GGUF file once and measures what it is asked for.
//
//   llama_worker MODEL.gguf THREADS
//   prefill TOKENS BATCH 0        seconds to read TOKENS ids of BATCH sequences, logits of the last one only
//   decode TOKENS BATCH DEPTH     seconds of TOKENS steps of BATCH sequences that have read DEPTH ids each
//
// One request a line, one JSON object a line back, with wall and CPU seconds and the peak of resident memory. Settings
// are those of the project's own llama-bench: batches of 2,048, of which 512 at once; float16 latents; flash attention as
// it chooses. Memory is cleared and the graph built outside of the timed part, which is run once before to warm up.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "llama.h"

namespace {

constexpr int kBatch = 2048;

[[noreturn]] void fail(const char * what) {
    std::fprintf(stderr, "llama_worker: %s\n", what);
    std::exit(1);
}

double cpu_seconds() {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](timeval t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// The most bytes this process held at once. Not getrusage's figure, which begins with that of the parent.
long long peak_memory() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.rfind("VmHWM:", 0) == 0) return 1024 * std::atoll(line.c_str() + 6);
    }
    return 0;
}

struct Worker {
    llama_model * model;
    int threads;
    std::mt19937 random{0};

    llama_context * context(int batch, int tokens) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = static_cast<uint32_t>(batch * (tokens + 64));
        params.n_seq_max = static_cast<uint32_t>(batch);
        params.n_batch = kBatch;
        params.n_threads = params.n_threads_batch = threads;
        llama_context * made = llama_init_from_model(model, params);
        if (!made) fail("no context could be made");
        return made;
    }

    llama_token id() {
        const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        return static_cast<llama_token>(std::uniform_int_distribution<int>(3, vocab - 1)(random));
    }

    // Appends `tokens` ids to one sequence; logits of the last.
    void read(llama_context * c, int sequence, int begin, int tokens) {
        llama_batch batch = llama_batch_init(kBatch, 0, 1);
        for (int done = 0; done < tokens; done += batch.n_tokens) {
            batch.n_tokens = std::min(kBatch, tokens - done);
            for (int i = 0; i < batch.n_tokens; ++i) put(batch, i, sequence, begin + done + i, done + i == tokens - 1);
            if (llama_decode(c, batch) != 0) fail("llama_decode refused a prompt");
        }
        llama_batch_free(batch);
        llama_synchronize(c);
    }

    // One token for each sequence at position `at`; logits of all.
    void step(llama_context * c, llama_batch & batch, int sequences, int at) {
        batch.n_tokens = sequences;
        for (int s = 0; s < sequences; ++s) put(batch, s, s, at, true);
        if (llama_decode(c, batch) != 0) fail("llama_decode refused a step");
        llama_synchronize(c);
    }

    void put(llama_batch & batch, int i, int sequence, int position, bool logits) {
        batch.token[i] = id();
        batch.pos[i] = position;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = logits;
    }

    template <class Run>
    void timed(Run run) {
        const double cpu = cpu_seconds();
        const auto start = std::chrono::steady_clock::now();
        run();
        const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - start;
        const double spent = cpu_seconds() - cpu;
        std::printf("{\"wall\": %.9f, \"cpu\": %.9f, \"peak_rss\": %lld}\n", wall.count(), spent, peak_memory());
        std::fflush(stdout);
    }

    void prefill(int tokens, int sequences) {
        llama_context * c = context(sequences, tokens);
        read(c, 0, 0, std::min(tokens, 32));
        llama_memory_clear(llama_get_memory(c), true);
        timed([&] { for (int s = 0; s < sequences; ++s) read(c, s, 0, tokens); });
        llama_free(c);
    }

    void decode(int tokens, int sequences, int depth) {
        llama_context * c = context(sequences, depth + tokens);
        for (int s = 0; s < sequences && depth > 0; ++s) read(c, s, 0, depth);
        llama_batch batch = llama_batch_init(sequences, 0, 1);
        for (int i = 0; i < 2; ++i) step(c, batch, sequences, depth++);
        timed([&] { for (int i = 0; i < tokens; ++i) step(c, batch, sequences, depth + i); });
        llama_batch_free(batch);
        llama_free(c);
    }
};

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3) fail("expected MODEL.gguf THREADS");
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
    }, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) fail("the model cannot be loaded");
    Worker worker{model, std::atoi(argv[2])};
    std::puts("{\"ready\": true}");
    std::fflush(stdout);
    std::string what;
    for (int tokens, batch, depth; std::cin >> what >> tokens >> batch >> depth;) {
        if (what == "prefill") worker.prefill(tokens, batch);
        else if (what == "decode") worker.decode(tokens, batch, depth);
        else fail("unknown request");
    }
    llama_model_free(model);
    llama_backend_free();
}

// A step through all layers of a decoder, and its logits, in one region: no Python, no torch and no waking of threads between ops.
//
//   embed → [ norm → qkv → q/k norm, rotate, KV write → attention → o + x → norm → gate·up → silu·mul → down + x ] × layers
//         → wanted rows only, after the last layer's attention → final norm → head
//
// Between ops the team meets at barriers, seven in a layer. Every op rounds its result as it does when called alone, so a step has the
// bits of `kernels.one_by_one` on the same ops.
#pragma once
#include "attention.h"
#include "attention_write.h"
#include "linear.h"
#include "small.h"

// As Python describes them too (kernels/cpu/layers.py). Norm weights are of the stack's type, q_norm and k_norm may be null.
struct LayerWeights {
    const void *input_norm, *q_norm, *k_norm, *post_norm;
    Linear qkv, o, gate_up, down;
};
struct Stack {
    int64_t hidden, mlp, heads, kv_heads, head_size, num_layers;
    const LayerWeights* layers;
    // [vocab, hidden], or null: rows of `head`.
    const void* embedding;
    const void* final_norm;
    Linear head;
    float eps;
};

// A step's rows, and where its results go: `hidden` [wanted, hidden], and `logits` [wanted, vocab] unless null.
struct Step {
    const int64_t* token_ids;
    int64_t rows;
    const void *cos, *sin;
    const AttentionStep* attention;
    // Rows to compute to the end; may be null if that is none or all.
    const int64_t* wanted;
    int64_t num_wanted;
    void *hidden, *logits;
    void* scratch;
};

// At so few rows every thread norms all of them for itself, which takes less time than a barrier.
constexpr int64_t FEW_ROWS = 4;

// Cuts scratch into pieces; with no memory it only counts.
class Pieces {
   public:
    explicit Pieces(void* memory) : memory_((char*)memory) {}
    template <class T = char>
    T* take(int64_t count) {
        char* piece = memory_ + used_;
        used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return (T*)piece;
    }
    int64_t used() const { return used_; }

   private:
    char* memory_;
    int64_t used_ = 0;
};

// What a step's ops hand each other, each [rows, …].
template <class T>
struct Between {
    T *x, *y, *normed, *qkv, *attended, *gate_up, *act, *wanted_attended, *wanted_x;
    void *attention, *linear;

    Between(const Stack& s, const Step& step, int threads, Pieces& pieces) {
        const int64_t rows = step.rows, wanted = step.wanted ? step.num_wanted : 0, q = s.heads * s.head_size;
        const int64_t widest = q > s.mlp ? q : s.mlp;
        x = pieces.take<T>(rows * s.hidden);
        y = pieces.take<T>(rows * s.hidden);
        const int64_t few = (rows < FEW_ROWS ? rows : FEW_ROWS) * threads;
        normed = pieces.take<T>((rows > few ? rows : few) * s.hidden);
        qkv = pieces.take<T>(rows * (s.heads + 2 * s.kv_heads) * s.head_size);
        attended = pieces.take<T>(rows * q);
        gate_up = pieces.take<T>(rows * 2 * s.mlp);
        act = pieces.take<T>(rows * s.mlp);
        wanted_attended = pieces.take<T>(wanted * q);
        wanted_x = pieces.take<T>(wanted * s.hidden);
        attention = pieces.take(step.attention ? attention_scratch_bytes(*step.attention, threads) : 0);
        linear = pieces.take(linear_scratch_bytes(widest > s.hidden ? widest : s.hidden, rows));
    }
};

// out[i] = from[rows[i]], `width` each.
template <class T>
void gather(Team& team, const T* from, const int64_t* rows, int64_t count, int64_t width, T* out) {
    const Range mine = share(team, count, 1);
    for (int64_t i = mine.begin; i < mine.end; ++i) std::memcpy(out + i * width, from + rows[i] * width, width * sizeof(T));
}

// One thread's walk through a step. Each function ends with a barrier behind what it wrote.
template <class T>
class Walk {
   public:
    Walk(Team& team, const Stack& stack, const Step& step, const Between<T>& between)
        : team(team), s(stack), step(step), b(between), x(b.x), rows(step.rows) {}

    void all() {
        look_up();
        for (int64_t i = 0; i < s.num_layers; ++i) {
            const bool last = i == s.num_layers - 1;
            write_kv(i, s.layers[i]);
            if (last && !step.num_wanted) return;
            attend(i);
            if (last && step.wanted) only_wanted();
            mlp(s.layers[i], last ? (T*)step.hidden : x);
        }
        if (step.logits) head((const T*)step.hidden);
    }

    void head(const T* hidden) { norm_linear(hidden, s.final_norm, s.head, (T*)step.logits); }

   private:
    Team& team;
    const Stack& s;
    const Step& step;
    const Between<T>& b;
    // Hidden states and how many there are: only the wanted ones behind the last layer's attention.
    T* x;
    int64_t rows;
    const T* attended = b.attended;

    void look_up() {
        if (s.embedding)
            gather(team, (const T*)s.embedding, step.token_ids, rows, s.hidden, x);
        else
            ::embed(team, s.head, step.token_ids, rows, x);
        team.barrier();
    }

    void norm_linear(const T* from, const void* weight, const Linear& w, T* to) {
        T* normed = b.normed;
        if (rows <= FEW_ROWS) {
            Team alone{0, 1, team.shared};
            normed += team.rank * rows * s.hidden;
            rms_norm(alone, from, rows, s.hidden, (const T*)weight, s.eps, normed);
        } else {
            rms_norm(team, from, rows, s.hidden, (const T*)weight, s.eps, normed);
            team.barrier();
        }
        linear(team, w, (const T*)normed, rows, (const T*)nullptr, to, b.linear);
        team.barrier();
    }

    void write_kv(int64_t index, const LayerWeights& layer) {
        norm_linear(x, layer.input_norm, layer.qkv, b.qkv);
        const QkvRows<T> of{b.qkv, (const T*)layer.q_norm, (const T*)layer.k_norm, s.eps, (const T*)step.cos, (const T*)step.sin};
        rotate_and_write(team, *step.attention, index, of);
        team.barrier();
    }

    void attend(int64_t index) {
        paged_attention(team, *step.attention, index, (const T*)b.qkv, b.attended, b.attention);
        team.barrier();
    }

    void only_wanted() {
        const int64_t q = s.heads * s.head_size;
        gather(team, b.attended, step.wanted, step.num_wanted, q, b.wanted_attended);
        gather(team, x, step.wanted, step.num_wanted, s.hidden, b.wanted_x);
        team.barrier();
        attended = b.wanted_attended;
        x = b.wanted_x;
        rows = step.num_wanted;
    }

    // From what attention gave to the hidden states behind the layer.
    void mlp(const LayerWeights& layer, T* to) {
        linear(team, layer.o, attended, rows, (const T*)x, b.y, b.linear);
        team.barrier();
        norm_linear(b.y, layer.post_norm, layer.gate_up, b.gate_up);
        silu_mul(team, (const T*)b.gate_up, rows, s.mlp, b.act);
        team.barrier();
        linear(team, layer.down, (const T*)b.act, rows, (const T*)b.y, to, b.linear);
        team.barrier();
    }
};

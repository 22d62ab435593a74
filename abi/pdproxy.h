/* The contract of pdproxy's policies, version 1, for guests in C. README.md of the
 * package abi is its specification. Include this header in one source file.
 *
 * A policy defines its hook with one of the macros PDPROXY_ON_PLAN, _PLACE, _MINT, _LEG
 * and _FINISH at the end of this file. Facts are valid during the call of the hook. */
#ifndef PDPROXY_H
#define PDPROXY_H

#include <stdint.h>

#define PDPROXY_EXPORT(name) __attribute__((export_name(name)))

/* The size in bytes of the memory for one frame and the edits of a leg. The proxy uses its
 * built-in rule for a request whose frame is larger. */
#ifndef PDPROXY_SCRATCH
#define PDPROXY_SCRATCH (256 * 1024)
#endif

/* A text: offset from the first byte of the frame, and size. */
typedef struct {
	uint32_t at, size;
} pdproxy_text;

/* A table: offset from the first byte of the frame, number of rows, size of a row. */
typedef struct {
	uint32_t at, rows, stride;
} pdproxy_table;

/* generated from package abi: */
#define PDPROXY_NEED_PROMPT 1ULL
#define PDPROXY_NEED_BLOCKS 2ULL
#define PDPROXY_NEED_CONVERSATION 4ULL
#define PDPROXY_NEED_RANKS 8ULL
#define PDPROXY_NEED_PAIRS 16ULL
#define PDPROXY_NEED_DETAILS 32ULL
#define PDPROXY_NEED_IDENTITY 64ULL
#define PDPROXY_NEED_PREDICTIONS 128ULL
#define PDPROXY_NEED_TRAITS 256ULL
#define PDPROXY_NEED_HEADERS 512ULL
#define PDPROXY_NEED_MEDIA 1024ULL
#define PDPROXY_FLAG_STREAM 1ULL
#define PDPROXY_FLAG_PAIR_BROKEN 2ULL
#define PDPROXY_FLAG_ADAPTERS 4ULL
#define PDPROXY_FLAG_TOOL_CALL 1ULL
#define PDPROXY_FLAG_SATURATED 1ULL
#define PDPROXY_FLAG_TOOLS 1ULL
#define PDPROXY_FLAG_IMAGES 2ULL
#define PDPROXY_FLAG_AUDIO 4ULL
#define PDPROXY_FLAG_PRESENT 1ULL
#define PDPROXY_FLAG_CUT 2ULL
#define PDPROXY_ROLE_PREFILL 1ULL
#define PDPROXY_ROLE_DECODE 2ULL
#define PDPROXY_FLOW_AGGREGATED 1ULL
#define PDPROXY_FLOW_PREFILL_FIRST 2ULL
#define PDPROXY_FLOW_CONCURRENT 3ULL
#define PDPROXY_FLOW_DECODE_FIRST 4ULL
#define PDPROXY_PLAN_PASS 0ULL
#define PDPROXY_PLAN_AGGREGATE 1ULL
#define PDPROXY_PLAN_DISAGGREGATE 2ULL
#define PDPROXY_PLAN_REJECT 3ULL
#define PDPROXY_PLAN_HOLD 4ULL
#define PDPROXY_PAIR_UNKNOWN 0ULL
#define PDPROXY_PAIR_WARMING 1ULL
#define PDPROXY_PAIR_READY 2ULL
#define PDPROXY_PAIR_BROKEN 3ULL
#define PDPROXY_ADAPTER_UNKNOWN 0ULL
#define PDPROXY_ADAPTER_RUNNING 1ULL
#define PDPROXY_ADAPTER_FREE 2ULL
#define PDPROXY_ADAPTER_WAITING 3ULL
#define PDPROXY_ADAPTER_FULL 4ULL
#define PDPROXY_MIN_DISAGG_ID 1099511627776ULL
#define PDPROXY_DISAGG_EPOCH_MS 1735689600000ULL
#define PDPROXY_LEG_SEND 0ULL
#define PDPROXY_LEG_FAILED 1ULL
#define PDPROXY_PHASE_PREFILL 1ULL
#define PDPROXY_PHASE_DECODE 2ULL
#define PDPROXY_LEG_PASS 0ULL
#define PDPROXY_LEG_EDITED 1ULL
#define PDPROXY_LEG_RETRY 1ULL
#define PDPROXY_LEG_PLACE_AGAIN 2ULL
#define PDPROXY_LEG_GIVE_UP 3ULL
#define PDPROXY_FULL_LIKELIHOOD 65535ULL
#define PDPROXY_SET_HEADER 1ULL
#define PDPROXY_ADD_HEADER 2ULL
#define PDPROXY_REMOVE_HEADER 3ULL
#define PDPROXY_SET_FIELD 4ULL
#define PDPROXY_REMOVE_FIELD 5ULL
#define PDPROXY_MAX_EDITS 256ULL
#define PDPROXY_OUT_SCORED 1ULL
#define PDPROXY_OUT_LOW_WINS 2ULL
#define PDPROXY_OUT_HIGH_WINS 4ULL
#define PDPROXY_OUT_SECONDS 256ULL
#define PDPROXY_OUT_TOKENS 512ULL
#define PDPROXY_OUT_REQUESTS 768ULL
#define PDPROXY_OUT_BLOCKS 1024ULL
#define PDPROXY_OUT_SHARE 1280ULL
#define PDPROXY_SCORE_DONE 1ULL

typedef struct {
	uint32_t magic; /* PDF1, 0x31464450 */
	uint16_t version; /* 1, or 2 if the policy needs a fact of version 2 */
	uint16_t hook; /* 1 plan, 2 place, 3 mint, 4 leg, 5 finish, 6 retain, 7 score, 8 evict */
	uint32_t header_size; /* 64; the facts begin there */
	uint32_t total_size; /* of the frame */
	uint32_t policy; /* index of the policy among those of its hook */
	uint32_t out_flags; /* written by the guest: bit 0, the rows carry scores; bits 1 and 2, the better score: 0 not stated, 1 low, 2 high; bits 8 to 15, the unit of the scores: 0 none, 1 seconds, 2 tokens, 3 requests, 4 blocks, 5 share (from 0 to 1) */
	uint64_t sequence; /* place: number of earlier placements among the same targets (one model, one shape of legs, one set of allowed engines; if conversations are needed, first turns count separately). Other hooks: number of earlier calls of this policy, over all instances of the module */
	uint64_t random; /* random number for this frame */
	int64_t unix_ms; /* the host's clock */
	uint32_t seed; /* random number of the host process, constant during its life */
	uint32_t facts_size;
	uint32_t edits_offset; /* written by the guest: see leg */
	uint32_t edits_size; /* written by the guest: see leg */
} pdproxy_header;
_Static_assert(sizeof(pdproxy_header) == 64, "pdproxy_header");

typedef struct {
	int64_t prompt_tokens; /* an estimate; exact for prompts of token ids */
	int64_t max_tokens; /* -1: the client set no limit */
	int64_t n; /* requested choices */
	uint32_t flags; /* bit 0: streamed; bit 1: the form of the request does not allow two legs; bit 2: in place, at least one row has a known adapter */
	uint32_t shared; /* number of the latest 32 conversations of the model that begin with the part of the prompt that candidates hold, such as a system prompt; 0 unless the request begins a conversation; needs blocks and conversation */
	pdproxy_text model;
	pdproxy_text conversation; /* needs conversation */
	pdproxy_text prompt; /* needs prompt: the JSON value of messages or prompt */
	int32_t turn; /* of the conversation, from 1; 0: not known; needs conversation */
	uint32_t reserved_60;
} pdproxy_request;
_Static_assert(sizeof(pdproxy_request) == 64, "pdproxy_request");

typedef struct {
	pdproxy_request request;
	int32_t prefill_targets; /* targets of role prefill or both that have a decode partner */
	int32_t decode_targets; /* targets of role decode or both that have a prefill partner */
	int32_t both_targets; /* targets that can serve an aggregated leg */
	uint32_t reserved_76;
	int64_t prefill_cached; /* largest number of cached prompt tokens among the targets for prefill; needs blocks */
	int64_t both_cached; /* the same among the targets for an aggregated leg */
	int64_t prefill_queued; /* smallest number of tokens that wait for prefill at one target; needs blocks */
	int64_t both_queued; /* the same among the targets for an aggregated leg */
	float prefill_us; /* measured: prefill of one uncached token; 0: unknown; needs blocks */
	float both_us; /* the same on the targets for an aggregated leg */
	float transfer_us; /* measured for two legs: transfer of one prompt token; 0: unknown */
	float handover_us; /* measured: additional cost of two legs; 0: unknown */
} pdproxy_plan;
_Static_assert(sizeof(pdproxy_plan) == 128, "pdproxy_plan");

typedef struct {
	pdproxy_request request;
	uint32_t flow; /* 1 aggregated: one leg on any row; 2 prefill_first, 3 concurrent, 4 decode_first: two legs */
	int32_t fixed; /* row of a prefill target that must not change, or -1 */
	pdproxy_table rows; /* the candidates */
	pdproxy_table pairs; /* needs pairs */
} pdproxy_place;
_Static_assert(sizeof(pdproxy_place) == 96, "pdproxy_place");

typedef struct {
	uint32_t instance; /* number that never changes, never 0 */
	int32_t rank;
	uint32_t group; /* targets of two groups cannot be paired */
	uint8_t roles; /* bit 0: takes prefill; bit 1: takes decode */
	uint8_t trial; /* 1: its circuit is half open; one request may try it */
	uint8_t pair; /* with the fixed prefill: 0 unknown, 1 warming, 2 ready, 3 broken */
	uint8_t home; /* phases of the conversation's last turn that ran here, as in roles; needs conversation */
	int32_t requests; /* in flight through this proxy */
	float score; /* written by the guest */
	int64_t tokens; /* in flight: prompts in prefill, and streams in decode with their expected output */
	int64_t queued; /* part of tokens: prompt tokens that wait for prefill; needs blocks */
	uint32_t blocks_gpu; /* leading KV blocks of the request that are here in GPU memory; needs blocks */
	uint32_t blocks_cpu; /* those in host memory and in no faster tier */
	uint32_t blocks_disk; /* those on disk only; the match is the sum of the three */
	uint32_t block_tokens; /* tokens of one block; 0: unknown; needs blocks */
	float usage; /* share of the KV memory in use, reported by the engine; 0: unknown */
	float token_us; /* measured: prefill of one uncached token here; 0: unknown */
	float recent_tokens; /* recently placed uncached prompt tokens; the weight of a placement is 1/e after ten minutes; needs blocks */
	float recent_requests; /* number of these placements, with the same weights; needs blocks */
	float busy; /* approximate share of the last minute for the computation of placed prompts at the measured speed; above 1 if more was placed; 0: nothing placed, or unknown speed; needs blocks */
	uint8_t adapter; /* the request's LoRA adapter, in the engine's last report: 0 unknown, 1 running, 2 free, 3 waiting, 4 full */
	uint8_t media; /* number of different images, sounds and videos of the request, at most 16; needs media */
	uint8_t media_sent; /* how many of them the host lately sent to the target for the computation of a prompt; needs media */
	uint8_t reserved_79;
} pdproxy_candidate;
_Static_assert(sizeof(pdproxy_candidate) == 80, "pdproxy_candidate");

typedef struct {
	int32_t prefill; /* row of the candidates */
	int32_t decode; /* row of the candidates */
	uint32_t state; /* 0 unknown, 1 warming, 2 ready, 3 broken */
	float transfer_us; /* measured: transfer of one prompt token; 0: unknown */
} pdproxy_pair;
_Static_assert(sizeof(pdproxy_pair) == 16, "pdproxy_pair");

typedef struct {
	int64_t unix_ms; /* time of the id, not of the request. It begins at the clock when the proxy reserves ids, and increases by 1 ms every 1024 ids */
	uint32_t counter; /* 0 to 1023 */
	uint8_t node;
	uint8_t worker; /* 0 to 63 */
	uint16_t reserved_14;
} pdproxy_mint;
_Static_assert(sizeof(pdproxy_mint) == 16, "pdproxy_mint");

typedef struct {
	pdproxy_request request;
	uint8_t event; /* 0: the leg is shaped and not yet sent; 1: the leg failed, before the client's first byte */
	uint8_t phase; /* 0 aggregated, 1 prefill, 2 decode */
	uint8_t flow; /* as in place */
	uint8_t reserved_67;
	uint32_t attempt; /* attempt of this phase, the first is 1 */
	uint32_t left; /* attempts that are allowed after this one */
	uint32_t status; /* failed leg: HTTP status of the engine, 0 without a status */
	uint32_t instance; /* target of the leg */
	int32_t rank;
	uint32_t partner; /* instance of the other leg, 0 without one */
	int32_t partner_rank;
	uint64_t disagg_id; /* 0 for an aggregated leg */
	int64_t elapsed_us; /* failed leg: time since it was sent */
	pdproxy_text engine; /* name of the instance */
	pdproxy_text reason; /* failed leg: as in pdproxy_leg_errors_total */
} pdproxy_leg;
_Static_assert(sizeof(pdproxy_leg) == 128, "pdproxy_leg");

typedef struct {
	uint32_t op; /* 1 set header, 2 add header, 3 remove header, 4 set field, 5 remove field */
	uint32_t name_size; /* at least 1 */
	uint32_t value_size;
} pdproxy_edit;
_Static_assert(sizeof(pdproxy_edit) == 12, "pdproxy_edit");

typedef struct {
	pdproxy_request request;
	uint8_t outcome; /* 1 ok, 2 client error, 3 engine error, 4 timeout, 5 cancelled, 6 broken stream, 7 shed, 8 no target, 9 internal */
	uint8_t flow; /* as in place; 0: no placement */
	uint8_t failed; /* phase of the failed leg: 0 none, 1 prefill, 2 decode */
	uint8_t reserved_67;
	uint32_t status; /* HTTP status for the client, 0 without a status */
	uint32_t prefill; /* instance; 0 for an aggregated request */
	int32_t prefill_rank;
	uint32_t decode; /* instance; 0 without a placement */
	int32_t decode_rank;
	uint64_t disagg_id; /* id of the last attempt; 0 without an id */
	int64_t placed_us; /* from the request's arrival to its placement */
	int64_t first_byte_us; /* to the client's first byte; -1: no byte was sent */
	int64_t total_us; /* to the end */
	int64_t prompt_tokens; /* as the engine counted them; -1: not reported */
	int64_t cached_tokens; /* part of prompt_tokens that was in the KV cache; -1: not reported */
	int64_t output_tokens; /* -1: unknown */
	uint32_t attempts; /* sent legs, over both phases */
	uint32_t reserved_148;
	pdproxy_text reason; /* of the error */
} pdproxy_finish;
_Static_assert(sizeof(pdproxy_finish) == 160, "pdproxy_finish");

typedef struct {
	float turns; /* number of turns, weighted; 0: nothing is known */
	float back; /* share of these turns after which the next turn came within most_ms */
	float p50_ms;
	float p75_ms;
	float p90_ms;
	float p95_ms;
	float p99_ms;
	uint32_t reserved_28;
} pdproxy_gaps;
_Static_assert(sizeof(pdproxy_gaps) == 32, "pdproxy_gaps");

typedef struct {
	uint32_t flags; /* bit 0: the answer ended with a call of a tool */
	uint32_t most_ms; /* longest time for which the host may retain the KV */
	int64_t tokens; /* tokens whose KV is retained */
	float usage; /* share of the KV memory of the decode engine in use; 0: unknown */
	uint32_t reserved_20;
	pdproxy_gaps conversation; /* of this conversation; 0 if the client did not name it */
	pdproxy_gaps tools; /* of the called tool with the longest gaps; 0 without a tool */
	pdproxy_gaps all; /* of all conversations */
} pdproxy_retain;
_Static_assert(sizeof(pdproxy_retain) == 120, "pdproxy_retain");

typedef struct {
	uint32_t flags; /* bit 0: the request waits because the engines of its model are saturated; else all places are taken */
	int32_t priority; /* of the waiting request */
	uint32_t class; /* hash of the name of its class, as in Identity */
	uint32_t tenant; /* the same hash of its tenant or client */
	int64_t prompt_tokens;
	int64_t remaining_ms; /* until the deadline of its first token; 0: no deadline */
	pdproxy_table running; /* the running requests that may end: at most 32, those of the lowest priority first, and of these the ones that got their places last */
	uint32_t reserved_44;
} pdproxy_evict;
_Static_assert(sizeof(pdproxy_evict) == 48, "pdproxy_evict");

typedef struct {
	int32_t priority;
	uint32_t class; /* as above */
	uint32_t tenant;
	uint32_t phase; /* 0 before the request has an engine, 1 until its answer begins, then 2 */
	uint32_t prefill; /* instance; 0: none */
	uint32_t decode; /* instance; 0: none */
	int64_t age_us; /* since the request got its place */
	int64_t prompt_tokens;
	int64_t sent; /* events of the answer that have been sent */
} pdproxy_evictable;
_Static_assert(sizeof(pdproxy_evictable) == 48, "pdproxy_evictable");

typedef struct {
	uint64_t client; /* 64-bit FNV-1a hash of the client's name, never of its key, 1 if the hash is 0; 0: unknown, as without keys */
	uint32_t tenant; /* 32-bit FNV-1a hash of the tenant's name, 1 if the hash is 0; 0: unknown */
	uint32_t class; /* the same hash of the name of the priority class; 0: no class is configured */
} pdproxy_identity;
_Static_assert(sizeof(pdproxy_identity) == 16, "pdproxy_identity");

typedef struct {
	pdproxy_table details; /* one row for each candidate, in the same order; no row if the policy does not need details */
	uint32_t predictions; /* offset of the predictions table; 0: there is none */
} pdproxy_more;
_Static_assert(sizeof(pdproxy_more) == 16, "pdproxy_more");

typedef struct {
	uint32_t zone; /* value of the label zone */
	uint32_t revision; /* value of the label revision */
	uint32_t hardware; /* value of the label hardware */
	float weight; /* as configured; 1 without a configuration */
	int32_t running; /* requests that run, in the engine's last report; -1: not known, or the report is too old */
	int32_t waiting; /* requests that wait there; -1: not known */
	uint32_t name_0; /* first other label, in the order of the names' texts */
	uint32_t value_0;
	uint32_t name_1;
	uint32_t value_1;
	uint32_t name_2;
	uint32_t value_2;
	uint32_t name_3;
	uint32_t value_3;
	uint32_t name_4;
	uint32_t value_4;
	int32_t context_least; /* with context_most the lengths of prompts in tokens that the engine is for, by its label context_length or llm-d.ai/context-length-range, such as 0-4096; both 0: no such label */
	int32_t context_most;
} pdproxy_detail;
_Static_assert(sizeof(pdproxy_detail) == 72, "pdproxy_detail");

typedef struct {
	float prefill_us; /* from the placement to the end of the prompt's prefill here, for a prefill or an aggregated leg */
	float prefill_error_us;
	float wait_us; /* part of prefill_us for requests that were placed here before */
	float start_us; /* from the end of prefill to the first token, if this candidate decodes after a prefill elsewhere */
	float start_error_us;
	float token_us; /* between two tokens of the answer, if this candidate decodes */
	float token_error_us;
	float reserved_28;
} pdproxy_prediction;
_Static_assert(sizeof(pdproxy_prediction) == 32, "pdproxy_prediction");

typedef struct {
	uint64_t salt; /* hash of the cache salt (cache_salt, and extra_key of SGLang), never the text; 0: no salt */
	int64_t remaining_ms; /* time until the deadline of the request, when the host writes the frame; 0: no deadline; negative: the deadline has passed */
	pdproxy_text adapter; /* name of the request's LoRA adapter, the first 256 bytes: the adapter that the request names beside its model (lora_path of SGLang, lora_request of TensorRT-LLM). In plan and place also an adapter that the engines serve as a model, as vLLM does */
	uint32_t flags; /* bit 0: the request offers tools; bit 1: a message has an image; bit 2: a message has audio */
	uint32_t token_limit_us; /* limit of the request for the mean time between two tokens of its answer; 0: no limit */
} pdproxy_traits;
_Static_assert(sizeof(pdproxy_traits) == 32, "pdproxy_traits");

typedef struct {
	pdproxy_table headers; /* one row for each name that the module declares, in the same order */
	uint32_t reserved_12;
} pdproxy_headers;
_Static_assert(sizeof(pdproxy_headers) == 16, "pdproxy_headers");

typedef struct {
	pdproxy_text value; /* the first 256 bytes; a character is not cut */
	uint32_t flags; /* bit 0: the request has the header, whose value may be empty; bit 1: the value was longer */
	uint32_t reserved_12;
} pdproxy_declared;
_Static_assert(sizeof(pdproxy_declared) == 16, "pdproxy_declared");

typedef struct {
	pdproxy_place place; /* the facts of place */
	pdproxy_identity identity;
	pdproxy_more more; /* details and predictions */
	pdproxy_traits traits;
	pdproxy_headers headers;
	uint32_t phases; /* phases of the leg, as in roles of a row: 1 prefill, 2 decode, 3 both, for an aggregated request */
	int32_t prefill; /* row of the chosen prefill target, if the leg is decode of two legs; else -1 */
	pdproxy_table scorers; /* the scorers in their order */
	pdproxy_table open; /* one byte for each row of the candidates: 1 if the row can take the leg and no scorer before has removed the row */
	pdproxy_table scores; /* written by the guest: of the first scorer one for each row of the candidates, then those of the second scorer */
	uint32_t reserved_220;
} pdproxy_score;
_Static_assert(sizeof(pdproxy_score) == 224, "pdproxy_score");

typedef struct {
	uint32_t scorer; /* index of the scorer among the policies of this hook */
	uint32_t unit; /* written by the guest: unit of value, as in out_flags */
} pdproxy_asked;
_Static_assert(sizeof(pdproxy_asked) == 8, "pdproxy_asked");

typedef struct {
	float score; /* 0 to 1, where 1 is best; below 0 removes the row. The host takes more than 1 as 1, and what is not a number as 0 */
	float value; /* fact of which the guest made the score, for explain */
} pdproxy_row_score;
_Static_assert(sizeof(pdproxy_row_score) == 8, "pdproxy_row_score");
/* end of the generated part */

static uint64_t pdproxy_memory[PDPROXY_SCRATCH / 8];

PDPROXY_EXPORT("pdproxy_v1_scratch")
void *pdproxy_scratch(uint32_t size) { return size <= sizeof pdproxy_memory ? pdproxy_memory : 0; }

/* pdproxy_frame returns the header of the current frame. */
static inline pdproxy_header *pdproxy_frame(void) { return (pdproxy_header *)pdproxy_memory; }

/* pdproxy_at returns the address of an offset in the current frame. */
static inline void *pdproxy_at(uint32_t offset) { return (uint8_t *)pdproxy_memory + offset; }

/* pdproxy_candidate_at returns a row of the candidates. */
static inline pdproxy_candidate *pdproxy_candidate_at(const pdproxy_place *f, int32_t row) {
	return pdproxy_at(f->rows.at + (uint32_t)row * f->rows.stride);
}

/* pdproxy_pair_at returns a row of the table of pairs. */
static inline pdproxy_pair *pdproxy_pair_at(const pdproxy_place *f, int32_t row) {
	return pdproxy_at(f->pairs.at + (uint32_t)row * f->pairs.stride);
}

/* pdproxy_declared_at returns a request header of the current frame by its position among the
 * names of PDPROXY_HEADERS, from 0; 0: the frame does not have it. The request has the header
 * if flags has PDPROXY_FLAG_PRESENT. */
static inline const pdproxy_declared *pdproxy_declared_at(uint32_t row) {
	static const uint32_t facts[] = {
		0, sizeof(pdproxy_plan), sizeof(pdproxy_place) + sizeof(pdproxy_more), 0, sizeof(pdproxy_leg), sizeof(pdproxy_finish)};
	const pdproxy_header *frame = pdproxy_frame();
	if (frame->version < 2 || frame->hook >= sizeof facts / sizeof facts[0])
		return 0;
	uint32_t at = facts[frame->hook] + sizeof(pdproxy_identity) + sizeof(pdproxy_traits);
	if (frame->facts_size < at + sizeof(pdproxy_headers))
		return 0;
	const pdproxy_table *t = &((const pdproxy_headers *)pdproxy_at(frame->header_size + at))->headers;
	return row < t->rows ? pdproxy_at(t->at + row * t->stride) : 0;
}

/* pdproxy_can_pair reports whether two rows can be the legs of one request. */
static inline int pdproxy_can_pair(const pdproxy_candidate *a, const pdproxy_candidate *b) {
	return a->group == b->group && a->instance != b->instance;
}

/* pdproxy_placed is the answer of the place hook: two rows, or -1 for none. */
static inline int64_t pdproxy_placed(int32_t prefill, int32_t decode) {
	return (int64_t)((uint64_t)(uint32_t)prefill << 32 | (uint32_t)decode);
}

/* pdproxy_retained is the answer of the retain hook: the time in ms, and the likelihood up to
 * PDPROXY_FULL_LIKELIHOOD. */
static inline int64_t pdproxy_retained(uint32_t ms, uint16_t likelihood) {
	return (int64_t)((uint64_t)ms | (uint64_t)likelihood << 32);
}

/* pdproxy_open reports whether a row can take the leg of a score frame. */
static inline int pdproxy_open(const pdproxy_score *f, uint32_t row) {
	return *(const uint8_t *)pdproxy_at(f->open.at + row);
}

/* pdproxy_set_score sets the score of a row by a scorer, the i-th of the frame. value is the fact of
 * which the score was made. The answer of the hook is PDPROXY_SCORE_DONE after all scores. */
static inline void pdproxy_set_score(const pdproxy_score *f, uint32_t i, uint32_t row, float score, float value) {
	pdproxy_row_score *to = pdproxy_at(f->scores.at + (i * f->place.rows.rows + row) * f->scores.stride);
	to->score = score;
	to->value = value;
}

/* pdproxy_evicted is the answer of the evict hook: a row, or -1 for none. */
static inline int64_t pdproxy_evicted(int32_t row) { return (int64_t)row + 1; }

/* pdproxy_planned is the answer of the plan hook: a decision, the HTTP status of a
 * rejection (0: 503), the limit of the time to first byte in ms (0: as configured). */
static inline int64_t pdproxy_planned(uint64_t decision, uint16_t status, uint32_t limit_ms) {
	return (int64_t)(decision | (uint64_t)status << 16 | (uint64_t)limit_ms << 32);
}

/* pdproxy_edit_leg appends an edit to a leg. It returns 0 if there is no room; the answer of
 * the hook must not be PDPROXY_LEG_EDITED then. The value of a field is JSON. */
static inline int pdproxy_edit_leg(uint32_t op, const char *name, const char *value) {
	pdproxy_header *frame = pdproxy_frame();
	pdproxy_edit edit = {op, 0, 0};
	while (name[edit.name_size])
		edit.name_size++;
	while (value[edit.value_size])
		edit.value_size++;
	if (frame->edits_size == 0)
		frame->edits_offset = frame->total_size;
	uint32_t at = frame->edits_offset + frame->edits_size, size = sizeof edit + edit.name_size + edit.value_size;
	if (size > sizeof pdproxy_memory - at)
		return 0;
	uint8_t *to = pdproxy_at(at);
	for (uint32_t i = 0; i < sizeof edit; i++)
		*to++ = ((const uint8_t *)&edit)[i];
	for (uint32_t i = 0; i < edit.name_size; i++)
		*to++ = (uint8_t)name[i];
	for (uint32_t i = 0; i < edit.value_size; i++)
		*to++ = (uint8_t)value[i];
	frame->edits_size += size;
	return 1;
}

#define PDPROXY_HOOK(hook, result)                                                        \
	static result pdproxy_##hook##_hook(const pdproxy_##hook *);                      \
	PDPROXY_EXPORT("pdproxy_v1_on_" #hook)                                            \
	result pdproxy_on_##hook(const void *frame, uint32_t size) {                      \
		(void)frame, (void)size;                                                  \
		return pdproxy_##hook##_hook(pdproxy_at(pdproxy_frame()->header_size));   \
	}                                                                                 \
	static result pdproxy_##hook##_hook

/* Each macro is followed by the parameter and the body of the hook:
 * PDPROXY_ON_PLACE(const pdproxy_place *f) { return pdproxy_placed(0, 1); } */
#define PDPROXY_ON_PLAN PDPROXY_HOOK(plan, int64_t)
#define PDPROXY_ON_PLACE PDPROXY_HOOK(place, int64_t)
#define PDPROXY_ON_MINT PDPROXY_HOOK(mint, int64_t)
#define PDPROXY_ON_LEG PDPROXY_HOOK(leg, int64_t)
#define PDPROXY_ON_FINISH PDPROXY_HOOK(finish, void)
#define PDPROXY_ON_RETAIN PDPROXY_HOOK(retain, int64_t)
#define PDPROXY_ON_SCORE PDPROXY_HOOK(score, int64_t)
#define PDPROXY_ON_EVICT PDPROXY_HOOK(evict, int64_t)

/* PDPROXY_NEEDS(PDPROXY_NEED_BLOCKS) asks for additional facts. */
#define PDPROXY_NEEDS(bits)                                                               \
	PDPROXY_EXPORT("pdproxy_v1_needs")                                                \
	int64_t pdproxy_needs(void) { return (int64_t)(bits); }

/* PDPROXY_HEADERS("x-tier\nx-region") declares request headers, one name a line. Policies with
 * PDPROXY_NEED_HEADERS get them. */
#define PDPROXY_HEADERS(names)                                                            \
	PDPROXY_EXPORT("pdproxy_v1_headers")                                              \
	int64_t pdproxy_declare(void) {                                                   \
		static const char text[] = names;                                         \
		return (int64_t)((uint64_t)(uintptr_t)text << 32 | (sizeof text - 1));    \
	}

#endif

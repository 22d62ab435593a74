//! The contract of pdproxy's policies, version 1, for guests in Rust. README.md of the
//! package abi is its specification.
//!
//! A policy defines its hook with one of the macros `on_plan`, `on_place`, `on_mint`,
//! `on_leg` and `on_finish`. Facts are valid during the call of the hook.
#![allow(dead_code, unused_macros, unused_imports, unused_unsafe)]

/// The size in bytes of the memory for one frame and the edits of a leg. The proxy uses its
/// built-in rule for a request whose frame is larger.
pub const SCRATCH: usize = 256 * 1024;

/// A text: offset from the first byte of the frame, and size.
#[repr(C)]
pub struct Text {
    at: u32,
    size: u32,
}

/// A table: offset from the first byte of the frame, number of rows, size of a row.
#[repr(C)]
pub struct Table {
    at: u32,
    pub rows: u32,
    stride: u32,
}

/* generated from package abi: */
pub const NEED_PROMPT: u64 = 1;
pub const NEED_BLOCKS: u64 = 2;
pub const NEED_CONVERSATION: u64 = 4;
pub const NEED_RANKS: u64 = 8;
pub const NEED_PAIRS: u64 = 16;
pub const NEED_DETAILS: u64 = 32;
pub const NEED_IDENTITY: u64 = 64;
pub const NEED_PREDICTIONS: u64 = 128;
pub const NEED_TRAITS: u64 = 256;
pub const NEED_HEADERS: u64 = 512;
pub const NEED_MEDIA: u64 = 1024;
pub const FLAG_STREAM: u32 = 1;
pub const FLAG_PAIR_BROKEN: u32 = 2;
pub const FLAG_ADAPTERS: u32 = 4;
pub const FLAG_TOOL_CALL: u32 = 1;
pub const FLAG_SATURATED: u32 = 1;
pub const FLAG_TOOLS: u32 = 1;
pub const FLAG_IMAGES: u32 = 2;
pub const FLAG_AUDIO: u32 = 4;
pub const FLAG_PRESENT: u32 = 1;
pub const FLAG_CUT: u32 = 2;
pub const ROLE_PREFILL: u8 = 1;
pub const ROLE_DECODE: u8 = 2;
pub const FLOW_AGGREGATED: u32 = 1;
pub const FLOW_PREFILL_FIRST: u32 = 2;
pub const FLOW_CONCURRENT: u32 = 3;
pub const FLOW_DECODE_FIRST: u32 = 4;
pub const PLAN_PASS: u64 = 0;
pub const PLAN_AGGREGATE: u64 = 1;
pub const PLAN_DISAGGREGATE: u64 = 2;
pub const PLAN_REJECT: u64 = 3;
pub const PLAN_HOLD: u64 = 4;
pub const PAIR_UNKNOWN: u8 = 0;
pub const PAIR_WARMING: u8 = 1;
pub const PAIR_READY: u8 = 2;
pub const PAIR_BROKEN: u8 = 3;
pub const ADAPTER_UNKNOWN: u8 = 0;
pub const ADAPTER_RUNNING: u8 = 1;
pub const ADAPTER_FREE: u8 = 2;
pub const ADAPTER_WAITING: u8 = 3;
pub const ADAPTER_FULL: u8 = 4;
pub const MIN_DISAGG_ID: u64 = 1099511627776;
pub const DISAGG_EPOCH_MS: i64 = 1735689600000;
pub const LEG_SEND: u8 = 0;
pub const LEG_FAILED: u8 = 1;
pub const PHASE_PREFILL: u8 = 1;
pub const PHASE_DECODE: u8 = 2;
pub const LEG_PASS: u64 = 0;
pub const LEG_EDITED: u64 = 1;
pub const LEG_RETRY: u64 = 1;
pub const LEG_PLACE_AGAIN: u64 = 2;
pub const LEG_GIVE_UP: u64 = 3;
pub const FULL_LIKELIHOOD: u64 = 65535;
pub const SET_HEADER: u32 = 1;
pub const ADD_HEADER: u32 = 2;
pub const REMOVE_HEADER: u32 = 3;
pub const SET_FIELD: u32 = 4;
pub const REMOVE_FIELD: u32 = 5;
pub const MAX_EDITS: u32 = 256;
pub const OUT_SCORED: u32 = 1;
pub const OUT_LOW_WINS: u32 = 2;
pub const OUT_HIGH_WINS: u32 = 4;
pub const OUT_SECONDS: u32 = 256;
pub const OUT_TOKENS: u32 = 512;
pub const OUT_REQUESTS: u32 = 768;
pub const OUT_BLOCKS: u32 = 1024;
pub const OUT_SHARE: u32 = 1280;
pub const SCORE_DONE: u64 = 1;

#[repr(C)]
pub struct Header {
    pub magic: u32, // PDF1, 0x31464450
    pub version: u16, // 1, or 2 if the policy needs a fact of version 2
    pub hook: u16, // 1 plan, 2 place, 3 mint, 4 leg, 5 finish, 6 retain, 7 score, 8 evict
    pub header_size: u32, // 64; the facts begin there
    pub total_size: u32, // of the frame
    pub policy: u32, // index of the policy among those of its hook
    pub out_flags: u32, // written by the guest: bit 0, the rows carry scores; bits 1 and 2, the better score: 0 not stated, 1 low, 2 high; bits 8 to 15, the unit of the scores: 0 none, 1 seconds, 2 tokens, 3 requests, 4 blocks, 5 share (from 0 to 1)
    pub sequence: u64, // place: number of earlier placements among the same targets (one model, one shape of legs, one set of allowed engines; if conversations are needed, first turns count separately). Other hooks: number of earlier calls of this policy, over all instances of the module
    pub random: u64, // random number for this frame
    pub unix_ms: i64, // the host's clock
    pub seed: u32, // random number of the host process, constant during its life
    pub facts_size: u32,
    pub edits_offset: u32, // written by the guest: see leg
    pub edits_size: u32, // written by the guest: see leg
}
const _: () = assert!(core::mem::size_of::<Header>() == 64);

#[repr(C)]
pub struct Request {
    pub prompt_tokens: i64, // an estimate; exact for prompts of token ids
    pub max_tokens: i64, // -1: the client set no limit
    pub n: i64, // requested choices
    pub flags: u32, // bit 0: streamed; bit 1: the form of the request does not allow two legs; bit 2: in place, at least one row has a known adapter
    pub shared: u32, // number of the latest 32 conversations of the model that begin with the part of the prompt that candidates hold, such as a system prompt; 0 unless the request begins a conversation; needs blocks and conversation
    pub model: Text,
    pub conversation: Text, // needs conversation
    pub prompt: Text, // needs prompt: the JSON value of messages or prompt
    pub turn: i32, // of the conversation, from 1; 0: not known; needs conversation
    pub reserved_60: u32,
}
const _: () = assert!(core::mem::size_of::<Request>() == 64);

#[repr(C)]
pub struct Plan {
    pub request: Request,
    pub prefill_targets: i32, // targets of role prefill or both that have a decode partner
    pub decode_targets: i32, // targets of role decode or both that have a prefill partner
    pub both_targets: i32, // targets that can serve an aggregated leg
    pub reserved_76: u32,
    pub prefill_cached: i64, // largest number of cached prompt tokens among the targets for prefill; needs blocks
    pub both_cached: i64, // the same among the targets for an aggregated leg
    pub prefill_queued: i64, // smallest number of tokens that wait for prefill at one target; needs blocks
    pub both_queued: i64, // the same among the targets for an aggregated leg
    pub prefill_us: f32, // measured: prefill of one uncached token; 0: unknown; needs blocks
    pub both_us: f32, // the same on the targets for an aggregated leg
    pub transfer_us: f32, // measured for two legs: transfer of one prompt token; 0: unknown
    pub handover_us: f32, // measured: additional cost of two legs; 0: unknown
}
const _: () = assert!(core::mem::size_of::<Plan>() == 128);

#[repr(C)]
pub struct Place {
    pub request: Request,
    pub flow: u32, // 1 aggregated: one leg on any row; 2 prefill_first, 3 concurrent, 4 decode_first: two legs
    pub fixed: i32, // row of a prefill target that must not change, or -1
    pub rows: Table, // the candidates
    pub pairs: Table, // needs pairs
}
const _: () = assert!(core::mem::size_of::<Place>() == 96);

#[repr(C)]
pub struct Candidate {
    pub instance: u32, // number that never changes, never 0
    pub rank: i32,
    pub group: u32, // targets of two groups cannot be paired
    pub roles: u8, // bit 0: takes prefill; bit 1: takes decode
    pub trial: u8, // 1: its circuit is half open; one request may try it
    pub pair: u8, // with the fixed prefill: 0 unknown, 1 warming, 2 ready, 3 broken
    pub home: u8, // phases of the conversation's last turn that ran here, as in roles; needs conversation
    pub requests: i32, // in flight through this proxy
    pub score: f32, // written by the guest
    pub tokens: i64, // in flight: prompts in prefill, and streams in decode with their expected output
    pub queued: i64, // part of tokens: prompt tokens that wait for prefill; needs blocks
    pub blocks_gpu: u32, // leading KV blocks of the request that are here in GPU memory; needs blocks
    pub blocks_cpu: u32, // those in host memory and in no faster tier
    pub blocks_disk: u32, // those on disk only; the match is the sum of the three
    pub block_tokens: u32, // tokens of one block; 0: unknown; needs blocks
    pub usage: f32, // share of the KV memory in use, reported by the engine; 0: unknown
    pub token_us: f32, // measured: prefill of one uncached token here; 0: unknown
    pub recent_tokens: f32, // recently placed uncached prompt tokens; the weight of a placement is 1/e after ten minutes; needs blocks
    pub recent_requests: f32, // number of these placements, with the same weights; needs blocks
    pub busy: f32, // approximate share of the last minute for the computation of placed prompts at the measured speed; above 1 if more was placed; 0: nothing placed, or unknown speed; needs blocks
    pub adapter: u8, // the request's LoRA adapter, in the engine's last report: 0 unknown, 1 running, 2 free, 3 waiting, 4 full
    pub media: u8, // number of different images, sounds and videos of the request, at most 16; needs media
    pub media_sent: u8, // how many of them the host lately sent to the target for the computation of a prompt; needs media
    pub reserved_79: u8,
}
const _: () = assert!(core::mem::size_of::<Candidate>() == 80);

#[repr(C)]
pub struct Pair {
    pub prefill: i32, // row of the candidates
    pub decode: i32, // row of the candidates
    pub state: u32, // 0 unknown, 1 warming, 2 ready, 3 broken
    pub transfer_us: f32, // measured: transfer of one prompt token; 0: unknown
}
const _: () = assert!(core::mem::size_of::<Pair>() == 16);

#[repr(C)]
pub struct Mint {
    pub unix_ms: i64, // time of the id, not of the request. It begins at the clock when the proxy reserves ids, and increases by 1 ms every 1024 ids
    pub counter: u32, // 0 to 1023
    pub node: u8,
    pub worker: u8, // 0 to 63
    pub reserved_14: u16,
}
const _: () = assert!(core::mem::size_of::<Mint>() == 16);

#[repr(C)]
pub struct Leg {
    pub request: Request,
    pub event: u8, // 0: the leg is shaped and not yet sent; 1: the leg failed, before the client's first byte
    pub phase: u8, // 0 aggregated, 1 prefill, 2 decode
    pub flow: u8, // as in place
    pub reserved_67: u8,
    pub attempt: u32, // attempt of this phase, the first is 1
    pub left: u32, // attempts that are allowed after this one
    pub status: u32, // failed leg: HTTP status of the engine, 0 without a status
    pub instance: u32, // target of the leg
    pub rank: i32,
    pub partner: u32, // instance of the other leg, 0 without one
    pub partner_rank: i32,
    pub disagg_id: u64, // 0 for an aggregated leg
    pub elapsed_us: i64, // failed leg: time since it was sent
    pub engine: Text, // name of the instance
    pub reason: Text, // failed leg: as in pdproxy_leg_errors_total
}
const _: () = assert!(core::mem::size_of::<Leg>() == 128);

#[repr(C)]
pub struct Edit {
    pub op: u32, // 1 set header, 2 add header, 3 remove header, 4 set field, 5 remove field
    pub name_size: u32, // at least 1
    pub value_size: u32,
}
const _: () = assert!(core::mem::size_of::<Edit>() == 12);

#[repr(C)]
pub struct Finish {
    pub request: Request,
    pub outcome: u8, // 1 ok, 2 client error, 3 engine error, 4 timeout, 5 cancelled, 6 broken stream, 7 shed, 8 no target, 9 internal
    pub flow: u8, // as in place; 0: no placement
    pub failed: u8, // phase of the failed leg: 0 none, 1 prefill, 2 decode
    pub reserved_67: u8,
    pub status: u32, // HTTP status for the client, 0 without a status
    pub prefill: u32, // instance; 0 for an aggregated request
    pub prefill_rank: i32,
    pub decode: u32, // instance; 0 without a placement
    pub decode_rank: i32,
    pub disagg_id: u64, // id of the last attempt; 0 without an id
    pub placed_us: i64, // from the request's arrival to its placement
    pub first_byte_us: i64, // to the client's first byte; -1: no byte was sent
    pub total_us: i64, // to the end
    pub prompt_tokens: i64, // as the engine counted them; -1: not reported
    pub cached_tokens: i64, // part of prompt_tokens that was in the KV cache; -1: not reported
    pub output_tokens: i64, // -1: unknown
    pub attempts: u32, // sent legs, over both phases
    pub reserved_148: u32,
    pub reason: Text, // of the error
}
const _: () = assert!(core::mem::size_of::<Finish>() == 160);

#[repr(C)]
pub struct Gaps {
    pub turns: f32, // number of turns, weighted; 0: nothing is known
    pub back: f32, // share of these turns after which the next turn came within most_ms
    pub p50_ms: f32,
    pub p75_ms: f32,
    pub p90_ms: f32,
    pub p95_ms: f32,
    pub p99_ms: f32,
    pub reserved_28: u32,
}
const _: () = assert!(core::mem::size_of::<Gaps>() == 32);

#[repr(C)]
pub struct Retain {
    pub flags: u32, // bit 0: the answer ended with a call of a tool
    pub most_ms: u32, // longest time for which the host may retain the KV
    pub tokens: i64, // tokens whose KV is retained
    pub usage: f32, // share of the KV memory of the decode engine in use; 0: unknown
    pub reserved_20: u32,
    pub conversation: Gaps, // of this conversation; 0 if the client did not name it
    pub tools: Gaps, // of the called tool with the longest gaps; 0 without a tool
    pub all: Gaps, // of all conversations
}
const _: () = assert!(core::mem::size_of::<Retain>() == 120);

#[repr(C)]
pub struct Evict {
    pub flags: u32, // bit 0: the request waits because the engines of its model are saturated; else all places are taken
    pub priority: i32, // of the waiting request
    pub class: u32, // hash of the name of its class, as in Identity
    pub tenant: u32, // the same hash of its tenant or client
    pub prompt_tokens: i64,
    pub remaining_ms: i64, // until the deadline of its first token; 0: no deadline
    pub running: Table, // the running requests that may end: at most 32, those of the lowest priority first, and of these the ones that got their places last
    pub reserved_44: u32,
}
const _: () = assert!(core::mem::size_of::<Evict>() == 48);

#[repr(C)]
pub struct Evictable {
    pub priority: i32,
    pub class: u32, // as above
    pub tenant: u32,
    pub phase: u32, // 0 before the request has an engine, 1 until its answer begins, then 2
    pub prefill: u32, // instance; 0: none
    pub decode: u32, // instance; 0: none
    pub age_us: i64, // since the request got its place
    pub prompt_tokens: i64,
    pub sent: i64, // events of the answer that have been sent
}
const _: () = assert!(core::mem::size_of::<Evictable>() == 48);

#[repr(C)]
pub struct Identity {
    pub client: u64, // 64-bit FNV-1a hash of the client's name, never of its key, 1 if the hash is 0; 0: unknown, as without keys
    pub tenant: u32, // 32-bit FNV-1a hash of the tenant's name, 1 if the hash is 0; 0: unknown
    pub class: u32, // the same hash of the name of the priority class; 0: no class is configured
}
const _: () = assert!(core::mem::size_of::<Identity>() == 16);

#[repr(C)]
pub struct More {
    pub details: Table, // one row for each candidate, in the same order; no row if the policy does not need details
    pub predictions: u32, // offset of the predictions table; 0: there is none
}
const _: () = assert!(core::mem::size_of::<More>() == 16);

#[repr(C)]
pub struct Detail {
    pub zone: u32, // value of the label zone
    pub revision: u32, // value of the label revision
    pub hardware: u32, // value of the label hardware
    pub weight: f32, // as configured; 1 without a configuration
    pub running: i32, // requests that run, in the engine's last report; -1: not known, or the report is too old
    pub waiting: i32, // requests that wait there; -1: not known
    pub name_0: u32, // first other label, in the order of the names' texts
    pub value_0: u32,
    pub name_1: u32,
    pub value_1: u32,
    pub name_2: u32,
    pub value_2: u32,
    pub name_3: u32,
    pub value_3: u32,
    pub name_4: u32,
    pub value_4: u32,
    pub context_least: i32, // with context_most the lengths of prompts in tokens that the engine is for, by its label context_length or llm-d.ai/context-length-range, such as 0-4096; both 0: no such label
    pub context_most: i32,
}
const _: () = assert!(core::mem::size_of::<Detail>() == 72);

#[repr(C)]
pub struct Prediction {
    pub prefill_us: f32, // from the placement to the end of the prompt's prefill here, for a prefill or an aggregated leg
    pub prefill_error_us: f32,
    pub wait_us: f32, // part of prefill_us for requests that were placed here before
    pub start_us: f32, // from the end of prefill to the first token, if this candidate decodes after a prefill elsewhere
    pub start_error_us: f32,
    pub token_us: f32, // between two tokens of the answer, if this candidate decodes
    pub token_error_us: f32,
    pub reserved_28: f32,
}
const _: () = assert!(core::mem::size_of::<Prediction>() == 32);

#[repr(C)]
pub struct Traits {
    pub salt: u64, // hash of the cache salt (cache_salt, and extra_key of SGLang), never the text; 0: no salt
    pub remaining_ms: i64, // time until the deadline of the request, when the host writes the frame; 0: no deadline; negative: the deadline has passed
    pub adapter: Text, // name of the request's LoRA adapter, the first 256 bytes: the adapter that the request names beside its model (lora_path of SGLang, lora_request of TensorRT-LLM). In plan and place also an adapter that the engines serve as a model, as vLLM does
    pub flags: u32, // bit 0: the request offers tools; bit 1: a message has an image; bit 2: a message has audio
    pub token_limit_us: u32, // limit of the request for the mean time between two tokens of its answer; 0: no limit
}
const _: () = assert!(core::mem::size_of::<Traits>() == 32);

#[repr(C)]
pub struct Headers {
    pub headers: Table, // one row for each name that the module declares, in the same order
    pub reserved_12: u32,
}
const _: () = assert!(core::mem::size_of::<Headers>() == 16);

#[repr(C)]
pub struct Declared {
    pub value: Text, // the first 256 bytes; a character is not cut
    pub flags: u32, // bit 0: the request has the header, whose value may be empty; bit 1: the value was longer
    pub reserved_12: u32,
}
const _: () = assert!(core::mem::size_of::<Declared>() == 16);

#[repr(C)]
pub struct Score {
    pub place: Place, // the facts of place
    pub identity: Identity,
    pub more: More, // details and predictions
    pub traits: Traits,
    pub headers: Headers,
    pub phases: u32, // phases of the leg, as in roles of a row: 1 prefill, 2 decode, 3 both, for an aggregated request
    pub prefill: i32, // row of the chosen prefill target, if the leg is decode of two legs; else -1
    pub scorers: Table, // the scorers in their order
    pub open: Table, // one byte for each row of the candidates: 1 if the row can take the leg and no scorer before has removed the row
    pub scores: Table, // written by the guest: of the first scorer one for each row of the candidates, then those of the second scorer
    pub reserved_220: u32,
}
const _: () = assert!(core::mem::size_of::<Score>() == 224);

#[repr(C)]
pub struct Asked {
    pub scorer: u32, // index of the scorer among the policies of this hook
    pub unit: u32, // written by the guest: unit of value, as in out_flags
}
const _: () = assert!(core::mem::size_of::<Asked>() == 8);

#[repr(C)]
pub struct RowScore {
    pub score: f32, // 0 to 1, where 1 is best; below 0 removes the row. The host takes more than 1 as 1, and what is not a number as 0
    pub value: f32, // fact of which the guest made the score, for explain
}
const _: () = assert!(core::mem::size_of::<RowScore>() == 8);
/* end of the generated part */

#[repr(align(8))]
struct Memory([u8; SCRATCH]);

static mut MEMORY: Memory = Memory([0; SCRATCH]);

fn memory() -> *mut u8 {
    unsafe { core::ptr::addr_of_mut!(MEMORY).cast() }
}

#[no_mangle]
pub extern "C" fn pdproxy_v1_scratch(size: u32) -> *mut u8 {
    if size as usize > SCRATCH {
        return core::ptr::null_mut();
    }
    memory()
}

/// Returns a part of the current frame. The host writes only offsets in the frame.
fn bytes(at: u32, size: u32) -> &'static [u8] {
    assert!(at as usize + size as usize <= SCRATCH);
    unsafe { core::slice::from_raw_parts(memory().add(at as usize), size as usize) }
}

/// Returns a structure of the current frame.
fn at<T>(at: u32) -> *mut T {
    assert!(at as usize + core::mem::size_of::<T>() <= SCRATCH && at % 8 == 0);
    unsafe { memory().add(at as usize).cast() }
}

/// Returns the header of the current frame.
pub fn frame() -> &'static mut Header {
    unsafe { &mut *at::<Header>(0) }
}

/// Returns the facts of the current frame. Only the macros of the hooks call it.
#[doc(hidden)]
pub fn facts<T>() -> &'static mut T {
    unsafe { &mut *at::<T>(frame().header_size) }
}

impl Text {
    pub fn as_str(&self) -> &str {
        core::str::from_utf8(bytes(self.at, self.size)).unwrap_or("")
    }
}

impl Table {
    fn row<T>(&self, i: i32) -> *mut T {
        assert!((i as u32) < self.rows);
        at(self.at + i as u32 * self.stride)
    }
}

impl Place {
    /// A row of the candidates.
    pub fn candidate(&self, row: i32) -> &Candidate {
        unsafe { &*self.rows.row::<Candidate>(row) }
    }

    /// All candidates with their rows.
    pub fn candidates(&self) -> impl Iterator<Item = (i32, &Candidate)> {
        (0..self.rows.rows as i32).map(move |i| (i, self.candidate(i)))
    }

    /// All rows of the table of pairs.
    pub fn pairs(&self) -> impl Iterator<Item = &Pair> {
        (0..self.pairs.rows as i32).map(move |i| unsafe { &*self.pairs.row::<Pair>(i) })
    }

    /// Sets the score of a row, which `pdproxy explain` shows.
    pub fn set_score(&mut self, row: i32, score: f32) {
        unsafe { (*self.rows.row::<Candidate>(row)).score = score }
        frame().out_flags |= OUT_SCORED;
    }

    /// Says what the scores mean: OUT_LOW_WINS or OUT_HIGH_WINS, and OUT_SECONDS, OUT_TOKENS,
    /// OUT_REQUESTS, OUT_BLOCKS or no unit.
    pub fn set_scale(&mut self, scale: u32) {
        frame().out_flags |= scale;
    }
}

/// Returns a request header of the current frame by its position among the names of
/// declare_headers!, from 0. The request has the header if flags has FLAG_PRESENT.
pub fn declared(row: u32) -> Option<&'static Declared> {
    use core::mem::size_of;
    let header = frame();
    let facts = match header.hook {
        1 => size_of::<Plan>(),
        2 => size_of::<Place>() + size_of::<More>(),
        4 => size_of::<Leg>(),
        5 => size_of::<Finish>(),
        _ => return None,
    };
    let offset = (facts + size_of::<Identity>() + size_of::<Traits>()) as u32;
    if header.version < 2 || header.facts_size < offset + size_of::<Headers>() as u32 {
        return None;
    }
    let table = unsafe { &(*at::<Headers>(header.header_size + offset)).headers };
    if row >= table.rows {
        return None;
    }
    Some(unsafe { &*table.row::<Declared>(row as i32) })
}

impl Score {
    /// Reports whether a row can take the leg.
    pub fn is_open(&self, row: i32) -> bool {
        bytes(self.open.at + row as u32, 1)[0] != 0
    }

    /// Sets the score of a row by a scorer, the i-th of the frame. value is the fact of which the
    /// score was made. The answer of the hook is SCORE_DONE after all scores.
    pub fn set(&mut self, i: u32, row: i32, score: f32, value: f32) {
        let to = self.scores.row::<RowScore>((i * self.place.rows.rows) as i32 + row);
        unsafe { *to = RowScore { score, value } }
    }
}

impl Candidate {
    /// Reports whether two rows can be the legs of one request.
    pub fn can_pair(&self, other: &Candidate) -> bool {
        self.group == other.group && self.instance != other.instance
    }
}

/// The answer of the place hook: two rows, or -1 for none.
pub fn placed(prefill: i32, decode: i32) -> u64 {
    (prefill as u32 as u64) << 32 | decode as u32 as u64
}

/// The answer of the retain hook: the time in ms, and the likelihood up to FULL_LIKELIHOOD.
pub fn retained(ms: u32, likelihood: u16) -> u64 {
    ms as u64 | (likelihood as u64) << 32
}

/// The answer of the evict hook: a row, or -1 for none.
pub fn evicted(row: i32) -> u64 {
    (row as i64 + 1) as u64
}

/// The answer of the plan hook: a decision, the HTTP status of a rejection (0: 503), and
/// the limit of the time to first byte in ms (0: as configured).
pub fn planned(decision: u64, status: u16, limit_ms: u32) -> u64 {
    decision | (status as u64) << 16 | (limit_ms as u64) << 32
}

impl Leg {
    /// Appends an edit to the leg. It returns false if there is no room; the answer of the
    /// hook must not be LEG_EDITED then. The value of a field is JSON.
    pub fn edit(&mut self, op: u32, name: &str, value: &str) -> bool {
        let header = frame();
        if header.edits_size == 0 {
            header.edits_offset = header.total_size;
        }
        let begin = (header.edits_offset + header.edits_size) as usize;
        let end = begin + core::mem::size_of::<Edit>() + name.len() + value.len();
        if end > SCRATCH {
            return false;
        }
        let to = unsafe { core::slice::from_raw_parts_mut(memory().add(begin), end - begin) };
        to[0..4].copy_from_slice(&op.to_le_bytes());
        to[4..8].copy_from_slice(&(name.len() as u32).to_le_bytes());
        to[8..12].copy_from_slice(&(value.len() as u32).to_le_bytes());
        to[12..12 + name.len()].copy_from_slice(name.as_bytes());
        to[12 + name.len()..].copy_from_slice(value.as_bytes());
        header.edits_size += (end - begin) as u32;
        true
    }
}

macro_rules! hook {
    ($macro:ident, $export:ident, $facts:ident, $d:tt) => {
        macro_rules! $macro {
            ($d hook:path) => {
                #[no_mangle]
                pub extern "C" fn $export(_frame: *const u8, _size: u32) -> u64 {
                    $d hook($crate::pdproxy::facts::<$crate::pdproxy::$facts>())
                }
            };
        }
        pub(crate) use $macro;
    };
}

hook!(on_plan, pdproxy_v1_on_plan, Plan, $);
hook!(on_place, pdproxy_v1_on_place, Place, $);
hook!(on_mint, pdproxy_v1_on_mint, Mint, $);
hook!(on_leg, pdproxy_v1_on_leg, Leg, $);
hook!(on_retain, pdproxy_v1_on_retain, Retain, $);
hook!(on_score, pdproxy_v1_on_score, Score, $);
hook!(on_evict, pdproxy_v1_on_evict, Evict, $);

macro_rules! on_finish {
    ($hook:path) => {
        #[no_mangle]
        pub extern "C" fn pdproxy_v1_on_finish(_frame: *const u8, _size: u32) {
            $hook($crate::pdproxy::facts::<$crate::pdproxy::Finish>())
        }
    };
}
pub(crate) use on_finish;

/// needs!(NEED_BLOCKS) asks for additional facts.
macro_rules! needs {
    ($bits:expr) => {
        #[no_mangle]
        pub extern "C" fn pdproxy_v1_needs() -> u64 {
            $bits
        }
    };
}
pub(crate) use needs;

/// declare_headers!("x-tier\nx-region") declares request headers, one name a line. Policies
/// with NEED_HEADERS get them.
macro_rules! declare_headers {
    ($names:expr) => {
        #[no_mangle]
        pub extern "C" fn pdproxy_v1_headers() -> u64 {
            let text: &'static str = $names;
            (text.as_ptr() as usize as u64) << 32 | text.len() as u64
        }
    };
}
pub(crate) use declare_headers;

//! A place policy in Rust without any SDK or crate: each leg goes to the target
//! with the fewest requests in flight, as in ../policy-go. Offsets:
//! abi/README.md.
#![no_std]
#![no_main]

use core::panic::PanicInfo;

const FLOW: usize = 64;
const FIXED: usize = 68;
const ROWS: usize = 72;
const PREFILL: u8 = 1;
const DECODE: u8 = 2;
const BOTH: u8 = 3;
const AGGREGATED: u8 = 1;

#[panic_handler]
fn panic(_: &PanicInfo) -> ! {
    core::arch::wasm32::unreachable()
}

const SIZE: usize = 128 * 1024; // room for 2000 rows

#[repr(align(8))]
struct Scratch([u8; SIZE]);

static mut SCRATCH: Scratch = Scratch([0; SIZE]);

#[no_mangle]
pub extern "C" fn pdproxy_v1_scratch(size: u32) -> *mut u8 {
    if size as usize > SIZE {
        return core::ptr::null_mut();
    }
    unsafe { core::ptr::addr_of_mut!(SCRATCH).cast() }
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    match b.get(at..at + 4) {
        Some(w) => u32::from_le_bytes([w[0], w[1], w[2], w[3]]),
        None => 0,
    }
}

struct Table<'a> {
    rows: &'a [u8],
    stride: usize,
}

impl<'a> Table<'a> {
    fn row(&self, i: i32) -> &'a [u8] {
        &self.rows[i as usize * self.stride..]
    }

    /// The row with the fewest requests that serves the role, or -1. A
    /// partner's row must be in the same group and on another instance.
    fn fewest(&self, role: u8, partner: i32) -> i32 {
        let pair = if partner >= 0 { Some(self.row(partner)) } else { None };
        let (mut best, mut least) = (-1, 0);
        for (i, c) in self.rows.chunks_exact(self.stride).enumerate() {
            if c[12] & role == 0 {
                continue;
            }
            if let Some(p) = pair {
                if u32_at(c, 8) != u32_at(p, 8) || u32_at(c, 0) == u32_at(p, 0) {
                    continue;
                }
            }
            let requests = u32_at(c, 16) as i32;
            if best < 0 || requests < least {
                best = i as i32;
                least = requests;
            }
        }
        best
    }
}

/// # Safety
/// The host passes the address and the size of a frame in the scratch buffer.
#[no_mangle]
pub unsafe extern "C" fn pdproxy_v1_on_place(frame: *const u8, size: usize) -> i64 {
    let frame = core::slice::from_raw_parts(frame, size);
    let facts = &frame[u32_at(frame, 8) as usize..];
    let (from, count) = (u32_at(facts, ROWS) as usize, u32_at(facts, ROWS + 4) as usize);
    let stride = (u32_at(facts, ROWS + 8) as usize).max(64);
    let table = Table { rows: &frame[from..from + count * stride], stride };
    let (prefill, decode) = if facts[FLOW] == AGGREGATED {
        (-1, table.fewest(BOTH, -1))
    } else {
        let fixed = u32_at(facts, FIXED) as i32; // a retry keeps its prefill target
        let prefill = if fixed >= 0 { fixed } else { table.fewest(PREFILL, -1) };
        (prefill, if prefill < 0 { -1 } else { table.fewest(DECODE, prefill) })
    };
    ((prefill as u32 as u64) << 32 | decode as u32 as u64) as i64
}

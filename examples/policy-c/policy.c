/* A place policy in C without any SDK: each leg goes to the target with the
 * fewest requests in flight, as in ../policy-go. Offsets: abi/README.md.
 * WebAssembly is little-endian and takes unaligned addresses, so a field is
 * read where it lies. */
#include <stdint.h>

#define EXPORT(name) __attribute__((export_name(name)))

static uint32_t u32(const uint8_t *p) { return *(const uint32_t *)p; }

enum { FLOW = 64, FIXED = 68, ROWS = 72, PREFILL = 1, DECODE = 2, BOTH = 3, AGGREGATED = 1 };

static uint64_t scratch[128 * 1024 / 8]; /* room for 2000 rows */

EXPORT("pdproxy_v1_scratch")
void *take_scratch(uint32_t size) { return size <= sizeof scratch ? scratch : 0; }

struct table {
	const uint8_t *rows;
	uint32_t count, stride;
};

static const uint8_t *row(const struct table *t, int32_t i) { return t->rows + (uint32_t)i * t->stride; }

/* fewest returns the row with the fewest requests that serves the role, in the
 * group and on another instance than the row that it pairs with. */
static int32_t fewest(const struct table *t, uint8_t role, int32_t partner) {
	int32_t best = -1, least = 0;
	for (uint32_t i = 0; i < t->count; i++) {
		const uint8_t *c = row(t, (int32_t)i);
		int32_t requests = (int32_t)u32(c + 16);
		if (!(c[12] & role))
			continue;
		if (partner >= 0) {
			const uint8_t *p = row(t, partner);
			if (u32(c + 8) != u32(p + 8) || u32(c) == u32(p))
				continue;
		}
		if (best < 0 || requests < least) {
			best = (int32_t)i;
			least = requests;
		}
	}
	return best;
}

EXPORT("pdproxy_v1_on_place")
int64_t on_place(const uint8_t *frame, uint32_t size) {
	const uint8_t *facts = frame + u32(frame + 8);
	struct table t = {frame + u32(facts + ROWS), u32(facts + ROWS + 4), u32(facts + ROWS + 8)};
	int32_t prefill = -1, decode;
	(void)size;
	if (facts[FLOW] == AGGREGATED) {
		decode = fewest(&t, BOTH, -1);
	} else {
		prefill = (int32_t)u32(facts + FIXED); /* a retry keeps its prefill target */
		if (prefill < 0)
			prefill = fewest(&t, PREFILL, -1);
		decode = prefill < 0 ? -1 : fewest(&t, DECODE, prefill);
	}
	return (int64_t)((uint64_t)(uint32_t)prefill << 32 | (uint32_t)decode);
}

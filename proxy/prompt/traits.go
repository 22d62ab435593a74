package prompt

import (
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// saltSeed separates the hashes of salts from the other hashes of the same text.
const saltSeed = 0x7061_6473_616c_7431

// Traits returns the traits of a request that its body has. They do not point into the
// body, because the finish hook reads them after the body is freed.
func Traits(r *openai.Request) abi.Traits {
	t := abi.Traits{Tools: r.Tools()}
	t.Images, t.Audio = r.Media()
	if salt := r.CacheSalt(); salt != "" {
		t.Salt = max(xxh3.HashStringSeed(salt, saltSeed), 1) // 0 means no salt
	}
	name := r.LoRA()
	t.Adapter = strings.Clone(strings.ToValidUTF8(name[:min(len(name), abi.MaxAdapter)], ""))
	return t
}

package prompt

import (
	"errors"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// budget is a Memory with a limit in bytes.
type budget struct{ limit, used int }

var errFull = errors.New("full")

func (b *budget) Derive(n int) error {
	if b.used+n > b.limit {
		return errFull
	}
	b.used += n
	return nil
}

// The budget counts the token ids of the client before they are read. A Prompt does not
// retain the memory of a long list.
func TestTokenIDsAreCounted(t *testing.T) {
	const n = 200_000
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"x"}],"prompt_token_ids":[` + strings.Repeat("1,", n-1) + `1]}`)
	for _, limit := range []int{8 << 20, 512 << 10} {
		var (
			m      Matcher
			p      Prompt
			r      openai.Request
			memory = budget{limit: limit}
		)
		if err := openai.ParseRequest(openai.Chat, body, &r); err != nil {
			t.Fatal(err)
		}
		ids, err := m.tokenIDs(t.Context(), &p, Source{Request: &r, Memory: &memory})
		if fits := limit > 4*n; fits != (err == nil && len(ids) == n && memory.used == 4*n) || !fits && err != errFull {
			t.Errorf("limit %d: %d ids, %v, %d bytes are counted", limit, len(ids), err, memory.used)
		}
		p.DropTokenIDs()
		if cap(p.ids) > maxKept {
			t.Errorf("limit %d: the Prompt keeps room for %d ids", limit, cap(p.ids))
		}
	}
}

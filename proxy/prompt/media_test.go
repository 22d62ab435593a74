package prompt

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/state/mediacache"
)

// TestMedia: each medium of a request has one hash, which the text beside it does not change. Media
// above the limit have none.
func TestMedia(t *testing.T) {
	media := func(text string, urls ...string) []mediacache.Hash {
		var parts strings.Builder
		for _, url := range urls {
			fmt.Fprintf(&parts, `,{"type":"image_url","image_url":{"url":%q}}`, url)
		}
		r := new(openai.Request)
		body := fmt.Sprintf(`{"messages":[{"role":"user","content":[{"type":"text","text":%q}%s]}]}`, text, parts.String())
		if err := openai.ParseRequest(openai.Chat, []byte(body), r); err != nil {
			t.Fatal(err)
		}
		return new(Prompt).Media(r)
	}
	if got := media("none"); len(got) != 0 {
		t.Errorf("hashes of no media: %v", got)
	}
	one, other := media("a", "http://a", "http://b", "http://a"), media("another text", "http://b", "http://c")
	if len(one) != 2 || len(other) != 2 || one[0] == one[1] || one[1] != other[0] || other[1] == one[0] {
		t.Errorf("hashes %v and %v", one, other)
	}
	var many []string
	for i := range 2 * mediacache.MaxMedia {
		many = append(many, fmt.Sprint("http://", i))
	}
	if got := media("many", many...); len(got) != mediacache.MaxMedia {
		t.Errorf("%d hashes of many media", len(got))
	}
}

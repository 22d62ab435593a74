package prompt

import (
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/state/mediacache"
)

// Media returns the hashes of the request's first mediacache.MaxMedia different images, sounds and
// videos. Media are equal if the client writes their URLs or their contents in the same way. The result
// is valid until the next call.
func (p *Prompt) Media(r *openai.Request) []mediacache.Hash {
	found := p.media[:0]
	for raw := range r.MediaParts {
		if h := mediacache.Hash(xxh3.Hash(raw)); !slices.Contains(found, h) {
			found = append(found, h)
		}
		if len(found) == mediacache.MaxMedia {
			break
		}
	}
	p.media = found
	return found
}

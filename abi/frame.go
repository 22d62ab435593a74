package abi

// Offsets of the header, the first bytes of every frame. README.md has the same
// tables for readers; a test compares the two.
const (
	offMagic     = 0
	offVersion   = 4
	offHook      = 6
	offHeader    = 8 // size of the header
	offTotal     = 12
	offPolicy    = 16
	offOut       = 20
	offSequence  = 24
	offRandom    = 32
	offUnixMilli = 40
	offSeed      = 48
	offFacts     = 52 // size of the facts, which follow the header
	offEdits     = 56
	offEditsLen  = 60

	// HeaderSize is the size of the header in version 1 of the contract.
	HeaderSize = 64

	// Magic is the first word of a frame, "PDF1".
	Magic = 'P' | 'D'<<8 | 'F'<<16 | '1'<<24

	// OutScored is the bit of the header's out flags by which a guest reports that it wrote a score
	// into the rows. The other bits are the Scale of the scores.
	OutScored = 1 << 0
)

// Offsets within the facts. Those of plan, place, leg and finish begin with the
// request's.
const (
	reqPromptTokens = 0
	reqMaxTokens    = 8
	reqN            = 16
	reqFlags        = 24
	reqShared       = 28
	reqModel        = 32
	reqConversation = 40
	reqPrompt       = 48
	reqTurn         = 56
	reqSize         = 64

	flagStream     = 1 << 0
	flagPairBroken = 1 << 1
	flagAdapters   = 1 << 2

	planPrefill        = reqSize
	planDecode         = reqSize + 4
	planBoth           = reqSize + 8
	planPrefillCached  = reqSize + 16
	planBothCached     = reqSize + 24
	planPrefillQueued  = reqSize + 32
	planBothQueued     = reqSize + 40
	planPrefillMicros  = reqSize + 48
	planBothMicros     = reqSize + 52
	planTransferMicros = reqSize + 56
	planHandoverMicros = reqSize + 60
	planSize           = reqSize + 64

	placeFlow       = reqSize
	placeFixed      = reqSize + 4
	placeRows       = reqSize + 8 // offset, count, stride
	placePairs      = reqSize + 20
	placeSize       = reqSize + 32
	pairSize        = 16
	pairPrefill     = 0
	pairDecode      = 4
	pairState       = 8
	pairTransfer    = 12
	rowInstance     = 0
	rowRank         = 4
	rowGroup        = 8
	rowRoles        = 12
	rowTrial        = 13
	rowPair         = 14
	rowHome         = 15
	rowRequests     = 16
	rowScore        = 20
	rowTokens       = 24
	rowQueued       = 32
	rowBlocksGPU    = 40
	rowBlocksCPU    = 44
	rowBlocksDisk   = 48
	rowBlockTokens  = 52
	rowUsage        = 56
	rowTokenMicros  = 60
	rowRecentTokens = 64
	rowRecentCount  = 68
	rowBusy         = 72
	rowAdapter      = 76
	rowMedia        = 77
	rowMediaSent    = 78
	mintUnixMilli   = 0
	mintCounter     = 8
	mintNode        = 12
	mintWorker      = 13
	mintSize        = 16
	legEvent        = reqSize
	legPhase        = reqSize + 1
	legFlow         = reqSize + 2
	legAttempt      = reqSize + 4
	legLeft         = reqSize + 8
	legStatus       = reqSize + 12
	legInstance     = reqSize + 16
	legRank         = reqSize + 20
	legPartner      = reqSize + 24
	legPartRank     = reqSize + 28
	legID           = reqSize + 32
	legElapsed      = reqSize + 40
	legEngine       = reqSize + 48
	legReason       = reqSize + 56
	legSize         = reqSize + 64
	finOutcome      = reqSize
	finFlow         = reqSize + 1
	finFailed       = reqSize + 2
	finStatus       = reqSize + 4
	finPrefill      = reqSize + 8
	finPrefillRank  = reqSize + 12
	finDecode       = reqSize + 16
	finDecodeRank   = reqSize + 20
	finID           = reqSize + 24
	finPlaced       = reqSize + 32
	finFirstByte    = reqSize + 40
	finTotal        = reqSize + 48
	finPromptTokens = reqSize + 56
	finCachedTokens = reqSize + 64
	finOutputTokens = reqSize + 72
	finAttempts     = reqSize + 80
	finReason       = reqSize + 88
	finSize         = reqSize + 96

	// A frame of version 2 has these facts after those of version 1: the identity,
	// and after it those of place.
	identityClient = 0
	identityTenant = 8
	identityClass  = 12
	identitySize   = 16
	moreDetails    = 0 // offset, count, stride
	moreSize       = 16

	morePredictions = 12 // offset; 0: no table

	// The traits follow all other facts of a frame of version 2, if the policy needs them.
	traitsSalt        = 0
	traitsRemaining   = 8
	traitsAdapter     = 16
	traitsFlags       = 24
	traitsTokenMicros = 28
	traitsSize        = 32

	flagTools  = 1 << 0
	flagImages = 1 << 1
	flagAudio  = 1 << 2

	// The headers follow the traits, if the policy needs headers. Then the frame has the bytes
	// of the traits in any case.
	headersTable = 0 // offset, count, stride
	headersSize  = 16
	headerValue  = 0
	headerFlags  = 8

	flagPresent = 1 << 0
	flagCut     = 1 << 1

	detailZone     = 0
	detailRevision = 4
	detailHardware = 8
	detailWeight   = 12
	detailRunning  = 16
	detailWaiting  = 20
	detailLabels   = 24
	labelSize      = 8
	detailContext  = 64

	predictPrefill      = 0
	predictPrefillError = 4
	predictWait         = 8
	predictStart        = 12
	predictStartError   = 16
	predictToken        = 20
	predictTokenError   = 24
)

// Header holds the values of a frame that are not facts.
type Header struct {
	Policy    uint32 // index of the policy among those of its hook
	Sequence  uint64 // see README.md; of a place frame PlaceFacts.Sequence
	Random    uint64 // drawn for this frame; of a place frame PlaceFacts.Random
	UnixMilli int64  // the host's clock
	Seed      uint32 // the same in all frames of one process, drawn at its start
	Layout
}

// Layout says which facts a frame has. It is the same for all frames of a policy.
type Layout struct {
	Extended bool // the frame is one of version 2
	Traits   bool // the facts have the traits of the request; only with Extended
	// Headers are the names of the request headers that the facts have, in lower case; only
	// with Extended. DecodeHeader leaves Headers nil, because a frame does not have the names.
	Headers []string
}

// LayoutFor returns the layout of the frames for a policy with these needs. headers are the
// names that its module declares.
func LayoutFor(needs Needs, headers []string) Layout {
	l := Layout{Extended: needs.Version() > 1, Traits: needs&NeedTraits != 0}
	if needs&NeedHeaders != 0 {
		l.Headers = headers
	}
	return l
}

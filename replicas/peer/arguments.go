package peer

import (
	"encoding/json"
	"unicode/utf8"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// Bounds of a peer's arguments and answers.
const (
	maxID        = 64   // bytes of the id of a replica, a volume or a member
	maxName      = 253  // bytes of the name of a snapshot
	maxMembers   = 64   // of a volume
	maxSnapshots = 4096 // snapshots of one sealed layer
	maxNote      = 1 << 20
	maxBroken    = 256 // damaged chunks in an answer
	maxDigests   = 64 << 20
)

// Arguments of calls. The fields' names are the names in JSON.
type (
	sizeArgs struct{ Size int64 }
	onArgs   struct{ On bool }
	markArgs struct{ Token, Epoch int64 }
	// regionArgs name regions: Set, or Regions in versions of the protocol before 3.
	regionArgs struct {
		Regions []int64    `json:",omitempty"`
		Set     *regionSet `json:",omitempty"`
	}
	cleanArgs struct {
		markArgs
		regionArgs
	}
	// intentsArgs ask for regions as a set, which versions of the protocol before 3 do not know.
	intentsArgs struct {
		Set bool `json:",omitempty"`
	}
	rangeArgs  struct{ Off, N int64 }
	uidArgs    struct{ UID string }
	noteArgs   json.RawMessage
	cutArgs    stack.Snapshot
	sealArgs   []stack.Snapshot
	repairArgs struct {
		Layer string
		Off   int64
		Right []byte // none: no form of the list is set
	}
	snapArgs struct {
		UID    string
		Off, N int64
	}
	changedArgs struct {
		From, To string
		Base     []string
		Piece    int64
	}
)

// Validate implements arguments. A replica refuses a size smaller than its own.
func (a sizeArgs) Validate(limits) error {
	if a.Size <= 0 || a.Size%block.Size != 0 || a.Size > api.MaxVolumeSize {
		return api.Errorf(api.OutOfRange, "%d is not a size that a volume can have", a.Size)
	}
	return nil
}

// Validate implements arguments.
func (onArgs) Validate(limits) error { return nil }

// Validate implements arguments.
func (a markArgs) Validate(limits) error {
	if a.Epoch < 0 {
		return api.Errorf(api.Invalid, "epoch %d", a.Epoch)
	}
	return nil
}

// Validate implements arguments. Regions beyond the end are fine: the replica may be smaller than the volume is now.
func (a regionArgs) Validate(limits) error {
	if a.Set != nil {
		return a.Set.check()
	}
	for _, g := range a.Regions {
		if g < 0 || g >= maxRegions {
			return api.Errorf(api.Invalid, "region %d: a volume has at most %d", g, maxRegions)
		}
	}
	return nil
}

// regionsWithin returns the regions within the replica.
func (a regionArgs) regionsWithin(l limits) []int64 {
	if a.Set != nil {
		return a.Set.regionsBelow(l.regions())
	}
	return a.Regions
}

func (a regionArgs) forVersion(version int) (any, error) {
	if version < setsSince {
		return a, nil
	}
	set, err := newRegionSet(a.Regions)
	return regionArgs{Set: set}, err
}

// Validate implements arguments.
func (a cleanArgs) Validate(l limits) error {
	if err := a.markArgs.Validate(l); err != nil {
		return err
	}
	return a.regionArgs.Validate(l)
}

func (a cleanArgs) forVersion(version int) (any, error) {
	if version < setsSince {
		return a, nil
	}
	set, err := newRegionSet(a.Regions)
	return cleanArgs{a.markArgs, regionArgs{Set: set}}, err
}

// Validate implements arguments.
func (intentsArgs) Validate(limits) error { return nil }

func (intentsArgs) forVersion(version int) (any, error) {
	return intentsArgs{version >= setsSince}, nil
}

// Validate implements arguments.
func (a rangeArgs) Validate(l limits) error { return checkRange(a.Off, a.N, maxDigests, l) }

// checkRange refuses a range that is longer than most, or not of whole blocks within the replica.
func checkRange(off, n, most int64, l limits) error {
	if off < 0 || n <= 0 || n > most || (off|n)%block.Size != 0 || off > l.size-n {
		return api.Errorf(api.Invalid, "%d bytes at %d of a replica with %d", n, off, l.size)
	}
	return nil
}

// Validate implements arguments.
func (a uidArgs) Validate(limits) error { return checkID(a.UID) }

// checkID refuses text that cannot be an id: only an id may become a part of a path or of a record.
func checkID(id string) error {
	if id == "" || len(id) > maxID {
		return api.Errorf(api.Invalid, "the id has %d characters, not 1 to %d", len(id), maxID)
	}
	for _, c := range []byte(id) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return api.Errorf(api.Invalid, "%q is no id", id)
		}
	}
	return nil
}

// Validate implements arguments.
func (a noteArgs) Validate(limits) error {
	if len(a) > maxNote {
		return api.Errorf(api.Invalid, "a note of %d bytes: at most %d", len(a), maxNote)
	}
	return nil
}

// MarshalJSON implements json.Marshaler.
func (a noteArgs) MarshalJSON() ([]byte, error) { return json.RawMessage(a).MarshalJSON() }

// UnmarshalJSON implements json.Unmarshaler.
func (a *noteArgs) UnmarshalJSON(b []byte) error { return (*json.RawMessage)(a).UnmarshalJSON(b) }

// Validate implements arguments.
func (a cutArgs) Validate(limits) error { return checkSnapshot(stack.Snapshot(a)) }

// checkSnapshot checks a snapshot's ids and its name; a layer without a snapshot has neither name nor uid.
func checkSnapshot(s stack.Snapshot) error {
	if len(s.Name) > maxName || !utf8.ValidString(s.Name) {
		return api.Errorf(api.Invalid, "the name of a snapshot has %d bytes", len(s.Name))
	}
	if s.UID != "" || s.Name != "" {
		if err := checkID(s.UID); err != nil {
			return err
		}
	}
	return checkID(s.Layer)
}

// UnmarshalJSON implements json.Unmarshaler.
func (a *sealArgs) UnmarshalJSON(b []byte) (err error) {
	*a, err = decodeList[[]stack.Snapshot](b)
	return err
}

// Validate implements arguments. All the snapshots get the layer of the first.
func (a sealArgs) Validate(limits) error {
	if len(a) == 0 || len(a) > maxSnapshots {
		return api.Errorf(api.Invalid, "a layer for %d snapshots", len(a))
	}
	for _, s := range a {
		s.Layer = a[0].Layer
		if err := checkSnapshot(s); err != nil {
			return err
		}
	}
	return nil
}

// Validate implements arguments.
func (a repairArgs) Validate(l limits) error {
	if a.Off < 0 || a.Off%block.ChunkSize != 0 || a.Off >= l.size || len(a.Right) > block.ChunkSize {
		return api.Errorf(api.Invalid, "%d bytes at %d are no chunk", len(a.Right), a.Off)
	}
	return checkID(a.Layer)
}

// Validate implements arguments.
func (a snapArgs) Validate(l limits) error {
	if err := checkID(a.UID); err != nil {
		return err
	}
	return checkRange(a.Off, a.N, digestPiece, l)
}

// Validate implements arguments.
func (a changedArgs) Validate(l limits) error {
	if a.Piece <= 0 || a.Piece%block.Size != 0 || (l.size-1)/a.Piece >= maxPieces {
		return api.Errorf(api.Invalid, "pieces of %d bytes of a replica with %d", a.Piece, l.size)
	}
	for _, id := range append([]string{a.From, a.To}, a.Base...) {
		if id == "" {
			continue
		}
		if err := checkID(id); err != nil {
			return err
		}
	}
	return nil
}

// validate checks the arguments that open a session.
func (q openRequest) validate() error {
	if err := checkID(q.Replica); err != nil {
		return err
	}
	return checkID(q.Volume)
}

// validate checks the arguments that adopt a session.
func (a adoption) validate() error {
	if a.Epoch < 0 || a.Incarnation < 0 || len(a.Members) > maxMembers {
		return api.Errorf(api.Invalid, "session %d.%d with %d members", a.Epoch, a.Incarnation, len(a.Members))
	}
	for _, id := range a.Members {
		if err := checkID(id); err != nil {
			return err
		}
	}
	return nil
}

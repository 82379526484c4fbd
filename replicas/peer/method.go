package peer

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"drover.io/drover/api"
)

// limits bound the arguments and the answers of a call.
type limits struct {
	size   int64 // of the replica
	region int64 // bytes of a region of the intents; 0: unknown at this end
}

// regions is how many regions the replica has.
func (l limits) regions() int64 {
	if l.region <= 0 {
		return maxRegions
	}
	return min((l.size+l.region-1)/l.region, maxRegions)
}

// arguments of a call. The sender validates them before sending, the receiver before use.
type arguments interface{ Validate(limits) error }

// versioned arguments have another form for a peer with an older version of the protocol.
type versioned interface {
	forVersion(version int) (any, error)
}

// none stands for empty arguments, or an empty answer.
type none struct{}

func (none) Validate(limits) error { return nil }

// method is a call of an engine to a replica: Member makes the call, Backend serves it.
type method[A arguments, R any] struct {
	name    string
	repeat  bool   // the call may run twice: sent again after a broken connection
	changes bool   // the call changes layers: never carried out for a former session after the answer to ADOPT
	commits bool   // the replica has other layers or snapshots after the call: a merge and reports may follow
	scope   string // the session's work that the call belongs to; empty: none
	ends    bool   // the call gives earlier calls of its scope up: their contexts end
	atOnce  int    // calls at once in a session, for reads of content and long lists; 0: any number
	run     func(ctx context.Context, b *Backend, args A) (R, error)
	encode  func(out R, args A) ([]byte, error)
	decode  func(b []byte, args A, l limits) (R, error) // and check
}

// servedMethod is a method at the server's end.
type servedMethod interface {
	callName() string
	changesLayers() bool
	commitsLayers() bool
	scopeName() (of string, ends bool)
	mostAtOnce() int
	serve(ctx context.Context, b *Backend, args []byte) ([]byte, error)
}

func (m *method[A, R]) callName() string                  { return m.name }
func (m *method[A, R]) scopeName() (of string, ends bool) { return m.scope, m.ends }
func (m *method[A, R]) changesLayers() bool               { return m.changes }
func (m *method[A, R]) commitsLayers() bool               { return m.commits }
func (m *method[A, R]) mostAtOnce() int                   { return m.atOnce }

// serve carries out a peer's call.
func (m *method[A, R]) serve(ctx context.Context, b *Backend, args []byte) ([]byte, error) {
	a, err := decodeJSON[A](args)
	if err == nil {
		err = a.Validate(b.limits())
	}
	if err != nil {
		return nil, fmt.Errorf("arguments of call %q: %w", m.name, err)
	}
	out, err := m.run(ctx, b, a)
	if err != nil || m.encode == nil {
		return nil, err
	}
	return m.encode(out, a)
}

// call makes the call of a replica on another node.
func (m *method[A, R]) call(ctx context.Context, on *Member, args A) (out R, err error) {
	if err := args.Validate(on.limits()); err != nil {
		return out, on.nameError(fmt.Errorf("call %q: %w", m.name, err))
	}
	b, err := on.callByName(ctx, m.name, args, m.repeat)
	if err != nil || m.decode == nil {
		return out, err
	}
	checked, err := m.decode(b, args, on.limits())
	if err != nil {
		return out, on.nameError(api.Errorf(api.Corrupt, "answer to call %q: %w", m.name, err))
	}
	return checked, nil
}

// callOf encodes a call for a peer of some version.
func callOf(name string, args any, version int) ([]byte, error) {
	if v, ok := args.(versioned); ok {
		var err error
		if args, err = v.forVersion(version); err != nil {
			return nil, err
		}
	}
	b, err := json.Marshal(args)
	return append([]byte(name+"\n"), b...), err
}

func decodeJSON[T any](b []byte) (T, error) {
	var t T
	if err := json.Unmarshal(b, &t); err != nil {
		return t, api.Errorf(api.Invalid, "%w", err)
	}
	return t, nil
}

// maxValues bounds the values in JSON with lists of objects: in memory, a list of empty objects has 100 times its
// bytes.
const maxValues = 256 << 10

// decodeList is decodeJSON for lists of objects.
func decodeList[T any](b []byte) (t T, err error) {
	if err := checkValues(b); err != nil {
		return t, err
	}
	return decodeJSON[T](b)
}

// checkValues refuses JSON with too many values.
func checkValues(b []byte) error {
	if n := bytes.Count(b, []byte{','}); n >= maxValues {
		return api.Errorf(api.Invalid, "%d values in a list: at most %d", n+1, maxValues)
	}
	return nil
}

// asJSON encodes an answer.
func asJSON[A arguments, R any](out R, _ A) ([]byte, error) { return json.Marshal(out) }

// asBytes decodes answers of raw bytes.
func asBytes[A arguments](out []byte, _ A) ([]byte, error) { return out, nil }

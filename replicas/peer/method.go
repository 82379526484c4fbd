package peer

import (
	"context"
	"encoding/json"
	"fmt"

	"drover.io/drover/api"
)

// limits are what the arguments and the answers of a call are checked against.
type limits struct {
	size   int64 // of the replica
	region int64 // bytes of a region of its intents; 0: not known at this end
}

// regions is how many regions the replica has.
func (l limits) regions() int64 {
	if l.region <= 0 {
		return maxRegions
	}
	return min((l.size+l.region-1)/l.region, maxRegions)
}

// arguments of a call. The sender validates them before they travel, the receiver before it uses them.
type arguments interface{ Validate(limits) error }

// versioned arguments have another form for a peer that speaks an older version of the protocol.
type versioned interface {
	forVersion(version int) (any, error)
}

// none is the arguments, or the answer, of a call that has none.
type none struct{}

func (none) Validate(limits) error { return nil }

// method is a call that an engine makes of a replica: Member sends it, Backend runs it.
type method[A arguments, R any] struct {
	name    string
	repeat  bool // it may be done twice, so it is sent again where the connection broke before the answer
	changes bool // it changes layers: none of a former session is carried out after ADOPT was answered
	atOnce  int  // how many of it a session may have under way, as they read content or make long lists; 0: any number
	run     func(ctx context.Context, b *Backend, args A) (R, error)
	encode  func(out R, args A) ([]byte, error)
	decode  func(b []byte, args A, l limits) (R, error) // and check
}

// servedMethod is a method as a server sees it.
type servedMethod interface {
	called() string
	changesLayers() bool
	mostAtOnce() int
	serve(ctx context.Context, b *Backend, args []byte) ([]byte, error)
}

func (m *method[A, R]) called() string      { return m.name }
func (m *method[A, R]) changesLayers() bool { return m.changes }
func (m *method[A, R]) mostAtOnce() int     { return m.atOnce }

// serve carries out a call that came from a peer.
func (m *method[A, R]) serve(ctx context.Context, b *Backend, args []byte) ([]byte, error) {
	a, err := decode[A](args)
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
		return out, on.name(fmt.Errorf("call %q: %w", m.name, err))
	}
	b, err := on.call(ctx, m.name, args, m.repeat)
	if err != nil || m.decode == nil {
		return out, err
	}
	checked, err := m.decode(b, args, on.limits())
	if err != nil {
		return out, on.name(api.Errorf(api.Corrupt, "answer to call %q: %w", m.name, err))
	}
	return checked, nil
}

// callOf is the payload of a call for a peer that speaks some version.
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

func decode[T any](b []byte) (T, error) {
	var t T
	if err := json.Unmarshal(b, &t); err != nil {
		return t, api.Errorf(api.Invalid, "%w", err)
	}
	return t, nil
}

// asJSON encodes an answer.
func asJSON[A arguments, R any](out R, _ A) ([]byte, error) { return json.Marshal(out) }

// asBytes is for answers that are bytes.
func asBytes[A arguments](out []byte, _ A) ([]byte, error) { return out, nil }

package api

import (
	"errors"
	"fmt"
)

// Kind is the sort of failure of an error, so that a door can translate the error (one table in driver) and a
// reconciler can decide whether to try again. Kinds survive wrapping with fmt.Errorf("...: %w", err).
type Kind uint8

// The kinds. Other is everything unforeseen, worth a retry and a look.
const (
	Other       Kind = iota
	Invalid          // the request can never succeed unchanged
	NotFound         // the named object does not exist
	Exists           // a different object has the name
	Busy             // the same or a conflicting operation is in progress: try again
	InUse            // the object's state forbids it: attached, referenced, dependent
	Full             // no room: disk, quota, attach limit, topology
	OutOfRange       // a size or an offset outside what is possible
	Unavailable      // a part of the system cannot be reached now
	Unsupported      // not supported yet, or not by this kernel
	Corrupt          // bytes do not match their checksum or format
	Denied           // an address, a credential or a fence forbids it
)

var kindNames = [...]string{"other", "invalid", "not found", "exists", "busy", "in use", "full", "out of range",
	"unavailable", "unsupported", "corrupt", "denied"}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "kind " + fmt.Sprint(uint8(k))
}

// Error is an error with a kind. The message is written for the user: the failure, the object, the remedy.
//
// +kubebuilder:object:generate=false
type Error struct {
	Kind Kind
	err  error
}

func (e *Error) Error() string { return e.err.Error() }
func (e *Error) Unwrap() error { return e.err }

// Errorf makes an error of kind k. As with fmt.Errorf, %w keeps the cause.
func Errorf(k Kind, format string, args ...any) error {
	return &Error{Kind: k, err: fmt.Errorf(format, args...)}
}

// KindOf is the kind of the outermost *Error in err's chain, or Other.
func KindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return Other
}

// Is reports whether err is of kind k.
func Is(err error, k Kind) bool { return err != nil && KindOf(err) == k }

// KindNamed is the kind for a word of Kind.String, as errors on the wire have.
func KindNamed(word string) Kind {
	for i, name := range kindNames {
		if name == word {
			return Kind(i)
		}
	}
	return Other
}

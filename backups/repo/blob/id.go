package blob

import (
	"crypto/sha256"
	"encoding/hex"

	"drover.io/drover/api"
)

// ID is the SHA-256 of a blob's plain bytes, or of a whole object of the repository.
type ID [sha256.Size]byte

// Sum is the ID of b.
func Sum(b []byte) ID { return sha256.Sum256(b) }

// Parse reads an ID as String writes the ID: 64 lower-case hexadecimal digits.
func Parse(text string) (id ID, err error) { return id, id.UnmarshalText([]byte(text)) }

func (id ID) String() string { return hex.EncodeToString(id[:]) }

// MarshalText is for encoding/json.
func (id ID) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, id[:]), nil }

// UnmarshalText is as strict as Parse.
func (id *ID) UnmarshalText(text []byte) error {
	if len(text) != hex.EncodedLen(len(id)) {
		return api.Errorf(api.Corrupt, "id: %d characters instead of %d", len(text), hex.EncodedLen(len(id)))
	}
	for i := range id {
		high, low := digit(text[2*i]), digit(text[2*i+1])
		if high|low > 15 {
			return api.Errorf(api.Corrupt, "id: character %d is no lower-case hexadecimal digit", 2*i)
		}
		id[i] = high<<4 | low
	}
	return nil
}

// digit is the value of a hexadecimal digit, or 255.
func digit(c byte) byte {
	switch {
	case '0' <= c && c <= '9':
		return c - '0'
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10
	}
	return 255
}

// Kind tells the content of files from their structure.
type Kind uint8

// The kinds, as pack headers number them.
const (
	Data Kind = iota
	Tree
	Kinds // how many kinds exist
)

func (k Kind) String() string { return [...]string{"data", "tree"}[k] }

// ParseKind reads a kind as String writes the kind.
func ParseKind(text []byte) (Kind, error) {
	switch string(text) {
	case "data":
		return Data, nil
	case "tree":
		return Tree, nil
	}
	return 0, api.Errorf(api.Corrupt, "kind of a blob: unknown word of %d characters; only data and tree exist", len(text))
}

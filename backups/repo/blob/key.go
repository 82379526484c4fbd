// Package blob owns the smallest parts of a repository: the id of a blob, the kind of a blob, and the key that seals
// blobs and files. To seal is to encrypt with AES-256 in counter mode and to authenticate with Poly1305-AES; restic's
// design document ("Keys, Encryption and MAC") has the format: nonce (16 bytes), encrypted bytes, MAC (16 bytes).
//
// Invariants: each sealing draws a new random nonce; Open decrypts nothing before the MAC matched, and compares MACs in
// constant time. A Key is immutable, and safe for concurrent use.
//
// The package starts no goroutine and has no lock.
package blob

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/subtle"

	"golang.org/x/crypto/poly1305" //nolint:staticcheck // restic's format has bare Poly1305; no other package offers it

	"drover.io/drover/api"
)

// Sizes in bytes.
const (
	nonceSize = aes.BlockSize
	Overhead  = nonceSize + poly1305.TagSize // what sealing adds
	Limit     = 128 << 20                    // the largest plain blob that a reader accepts
)

// Secret has the bytes of a key, which key files keep.
type Secret struct {
	Encrypt [32]byte // AES-256
	MACKey  [16]byte // the K of Poly1305-AES
	MACMask [16]byte // the r of Poly1305-AES
}

// NewSecret draws a random secret.
func NewSecret() (s Secret) {
	for _, b := range [][]byte{s.Encrypt[:], s.MACKey[:], s.MACMask[:]} {
		_, _ = rand.Read(b) // never fails
	}
	s.MACMask = maskPoly1305(s.MACMask)
	return s
}

// maskPoly1305 clears the bits of r that Poly1305 never uses.
func maskPoly1305(r [16]byte) [16]byte {
	for _, i := range [...]int{3, 7, 11, 15} {
		r[i] &= 15
	}
	for _, i := range [...]int{4, 8, 12} {
		r[i] &= 252
	}
	return r
}

// Key seals and opens.
type Key struct {
	encrypt cipher.Block
	mac     cipher.Block
	r       [16]byte
}

// NewKey prepares the ciphers of a secret.
func NewKey(s Secret) *Key {
	return &Key{encrypt: newCipher(s.Encrypt[:]), mac: newCipher(s.MACKey[:]), r: maskPoly1305(s.MACMask)}
}

func newCipher(key []byte) cipher.Block {
	c, err := aes.NewCipher(key)
	if err != nil {
		panic(err) // only a wrong length fails, and the types of Secret exclude this
	}
	return c
}

// Seal appends the sealed plain to dst, in place if dst has room for len(plain)+Overhead bytes. The appended bytes
// must not overlap plain.
func (k *Key) Seal(dst, plain []byte) []byte {
	at := len(dst)
	if need := at + len(plain) + Overhead; cap(dst) < need {
		dst = append(make([]byte, 0, need), dst...)
	}
	dst = dst[:at+len(plain)+Overhead]
	nonce, sealed := dst[at:at+nonceSize], dst[at+nonceSize:at+nonceSize+len(plain)]
	_, _ = rand.Read(nonce) // never fails
	cipher.NewCTR(k.encrypt, nonce).XORKeyStream(sealed, plain)
	tag := k.authenticate(nonce, sealed)
	copy(dst[len(dst)-len(tag):], tag[:])
	return dst
}

// Open decrypts sealed in place; the result is a part of its memory. An error is of kind Corrupt, and leaves sealed as
// it was.
func (k *Key) Open(sealed []byte) ([]byte, error) {
	if len(sealed) < Overhead {
		return k.OpenTo(nil, sealed)
	}
	return k.OpenTo(sealed[nonceSize:], sealed)
}

// OpenTo decrypts sealed into dst, which has len(sealed)-Overhead bytes at least and does not overlap sealed, unless it
// begins where the encrypted bytes do. An error is of kind Corrupt, and leaves dst as it was.
func (k *Key) OpenTo(dst, sealed []byte) ([]byte, error) {
	if len(sealed) < Overhead {
		return nil, api.Errorf(api.Corrupt, "%d bytes are too short for a nonce and a MAC", len(sealed))
	}
	end := len(sealed) - poly1305.TagSize
	nonce, body := sealed[:nonceSize], sealed[nonceSize:end]
	tag := k.authenticate(nonce, body)
	if subtle.ConstantTimeCompare(tag[:], sealed[end:]) != 1 {
		return nil, api.Errorf(api.Corrupt, "the MAC does not match the bytes")
	}
	dst = dst[:len(body)]
	cipher.NewCTR(k.encrypt, nonce).XORKeyStream(dst, body)
	return dst, nil
}

func (k *Key) authenticate(nonce, sealed []byte) (tag [poly1305.TagSize]byte) {
	var once [32]byte
	copy(once[:16], k.r[:])
	k.mac.Encrypt(once[16:], nonce)
	poly1305.Sum(&tag, sealed, &once)
	return tag
}

package wire

import (
	"context"
	"net"
	"syscall"
	"time"
)

// TCP repeats unconfirmed data after a pause, and doubles the pause each time, up to two minutes: a connection that
// outlives an outage of a minute would be silent for up to one more. Between machines of one cluster a second is long
// enough. Kernels before 6.15 do not know the option, and double.
const (
	tcpRTOMax      = 44 // TCP_RTO_MAX_MS
	tcpUserTimeout = 18 // TCP_USER_TIMEOUT
	resendAfter    = time.Second
	// With pauses so short the kernel would give a connection up after 15 s.
	giveUpAfter = time.Minute
)

func setTimeouts(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		if syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpRTOMax, int(resendAfter.Milliseconds())) == nil {
			_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(giveUpAfter.Milliseconds()))
		}
	})
}

// NewDialer makes connections to other machines, each try of which takes 5 s at most.
func NewDialer() *net.Dialer {
	d := &net.Dialer{KeepAlive: 10 * time.Second, Timeout: dialTime, Control: setTimeouts}
	d.SetMultipathTCP(false) // MPTCP does not know the options
	return d
}

// Listen takes connections of other machines.
func Listen(address string) (net.Listener, error) {
	l := net.ListenConfig{Control: setTimeouts}
	l.SetMultipathTCP(false)
	return l.Listen(context.Background(), "tcp", address)
}

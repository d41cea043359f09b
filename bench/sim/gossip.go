package main

import (
	"math"
	"math/bits"
	"math/rand/v2"
	"time"
)

// gossipModel is what memberlist does with summaries, without the summaries: in
// each interval a node sends packets to nodes that it draws, each with the messages
// that it has sent the least; a message that is new to who gets it goes on from
// there, and one that was sent often enough is forgotten. Two nodes compare all they
// have from time to time. What it leaves out are lost packets, time on the wire and
// processors that are busy. Its one fitted number is how many messages a packet
// holds.
type gossipModel struct {
	nodes     int
	interval  time.Duration // between a node's rounds,
	fanout    int           // in which so many packets are sent
	probe     time.Duration // between its pings, which carry messages too, as their answers do
	pushPull  time.Duration // between comparisons of all, for up to 32 nodes
	perPacket int
	publish   time.Duration // between a node's summaries
	seed      uint64
}

// Memberlist's settings of the paces, as transport has them.
func gossipLAN(nodes, perPacket int, publish time.Duration) gossipModel {
	return gossipModel{nodes, 50 * time.Millisecond, 3, 300 * time.Millisecond, 10 * time.Second, perPacket, publish, 1}
}

func gossipWAN(nodes, perPacket int, publish time.Duration) gossipModel {
	return gossipModel{nodes, 500 * time.Millisecond, 4, 5 * time.Second, 60 * time.Second, perPacket, publish, 1}
}

// retransmits is how often a node passes a message on.
func retransmits(nodes int) int { return 4 * int(math.Ceil(math.Log10(float64(nodes)+1))) }

// comparing is the time between a node's comparisons of all, which memberlist
// stretches with the number of nodes.
func comparing(interval time.Duration, nodes int) time.Duration {
	if nodes <= 32 {
		return interval
	}
	return interval * time.Duration(math.Ceil(math.Log2(float64(nodes))-5)+1)
}

// classes is in how many lengths messages come. Of those that were sent equally
// often the longest goes first, and of these the newest.
const classes = 4

// gossipRun is a model under way.
type gossipRun struct {
	gossipModel
	limit   int
	now     time.Duration
	dice    *rand.Rand
	version []uint16 // that node i has of node j, at i*nodes+j
	tier    []uint8  // how often i has sent it; none if it is not in i's queue
	queues  []sendQueue
	born    [][]time.Duration // by node and version
	packets int64
	sent    int64 // messages
}

const none = 0xff

// sendQueue is a node's messages, by how often they were sent and by length. What
// is out of date in it is passed over.
type sendQueue struct {
	stacks [][]queued // tier*classes + class
	filled [2]uint64  // stacks that are not empty
}

type queued struct{ about, version uint16 }

func (g gossipModel) start() *gossipRun {
	r := &gossipRun{
		gossipModel: g, limit: retransmits(g.nodes), dice: rand.New(rand.NewPCG(g.seed, 3)),
		version: make([]uint16, g.nodes*g.nodes), tier: make([]uint8, g.nodes*g.nodes),
		queues: make([]sendQueue, g.nodes), born: make([][]time.Duration, g.nodes),
	}
	for i := range r.tier {
		r.tier[i] = none
	}
	for i := range r.queues {
		r.queues[i].stacks = make([][]queued, r.limit*classes)
		r.born[i] = []time.Duration{0}
	}
	return r
}

// tell publishes a summary of a node.
func (r *gossipRun) tell(i int) {
	r.born[i] = append(r.born[i], r.now)
	r.learn(i, i, uint16(len(r.born[i])-1))
}

// learn has a node hear of a version of another, and pass it on.
func (r *gossipRun) learn(i, about int, version uint16) {
	at := i*r.nodes + about
	r.version[at], r.tier[at] = version, 0
	r.push(i, 0, queued{uint16(about), version})
}

func (r *gossipRun) push(i, tier int, m queued) {
	q := &r.queues[i]
	s := tier*classes + (classes - 1 - int(m.about)%classes)
	if stack := q.stacks[s]; len(stack) > 64 && len(stack) > 2*r.nodes/classes {
		kept := stack[:0]
		for _, old := range stack {
			if r.current(i, tier, old) {
				kept = append(kept, old)
			}
		}
		q.stacks[s] = kept
	}
	q.stacks[s] = append(q.stacks[s], m)
	q.filled[s/64] |= 1 << (s % 64)
}

func (r *gossipRun) current(i, tier int, m queued) bool {
	at := i*r.nodes + int(m.about)
	return r.version[at] == m.version && int(r.tier[at]) == tier
}

// take is what the next packet of a node holds.
func (r *gossipRun) take(i int, packet []queued) []queued {
	q := &r.queues[i]
	var tiers [16]int
	for word := range q.filled {
		for q.filled[word] != 0 && len(packet) < r.perPacket {
			s := word*64 + bits.TrailingZeros64(q.filled[word])
			stack := q.stacks[s]
			m := stack[len(stack)-1]
			if q.stacks[s] = stack[:len(stack)-1]; len(stack) == 1 {
				q.filled[word] &^= 1 << (s % 64)
			}
			if tier := s / classes; r.current(i, tier, m) {
				tiers[len(packet)] = tier
				packet = append(packet, m)
			}
		}
	}
	for k, m := range packet {
		if at := i*r.nodes + int(m.about); tiers[k]+1 >= r.limit {
			r.tier[at] = none
		} else {
			r.tier[at] = uint8(tiers[k] + 1)
			r.push(i, tiers[k]+1, m)
		}
	}
	return packet
}

// send is one packet. It reports whether there was anything to send.
func (r *gossipRun) send(from, to int) bool {
	var buf [16]queued
	packet := r.take(from, buf[:0])
	if len(packet) == 0 {
		return false
	}
	r.packets++
	r.sent += int64(len(packet))
	for _, m := range packet {
		if r.version[to*r.nodes+int(m.about)] < m.version {
			r.learn(to, int(m.about), m.version)
		}
	}
	return true
}

func (r *gossipRun) other(i int) int {
	if j := r.dice.IntN(r.nodes - 1); j < i {
		return j
	} else {
		return j + 1
	}
}

// compare gives two nodes what either has.
func (r *gossipRun) compare(i, j int) {
	for about := range r.nodes {
		mine, its := r.version[i*r.nodes+about], r.version[j*r.nodes+about]
		switch {
		case mine < its:
			r.learn(i, about, its)
		case mine > its:
			r.learn(j, about, mine)
		}
	}
}

// round is one interval of all nodes. What gets to a node is passed on by it in the
// same interval if its turn is yet to come.
func (r *gossipRun) round(number int) {
	every := func(d time.Duration, i int) bool { // a node's own phase
		n := max(1, int(d/r.interval))
		return (number+i*7919)%n == 0
	}
	for i := range r.nodes {
		if r.publish > 0 && every(r.publish, i) {
			r.tell(i)
		}
		for range min(r.fanout, r.nodes-1) {
			if !r.send(i, r.other(i)) {
				break
			}
		}
		if every(r.probe, i) {
			j := r.other(i)
			r.send(i, j)
			r.send(j, i)
		}
		if every(comparing(r.pushPull, r.nodes), i) {
			r.compare(i, r.other(i))
		}
	}
	r.now += r.interval
}

// views runs for a while and gives the ages, in seconds, of what nodes know of
// each other, and what a node sends in a second.
func (g gossipModel) views(warmup, window time.Duration) (ages []float64, packets, messages float64) {
	r := g.start()
	number := 0
	for ; r.now < warmup; number++ {
		r.round(number)
	}
	r.packets, r.sent = 0, 0
	for began := r.now; r.now < began+window; number++ {
		r.round(number)
		if number%max(1, int(time.Second/r.interval)) == 0 {
			for range 1000 {
				i := r.dice.IntN(r.nodes)
				j := r.other(i)
				ages = append(ages, (r.now - r.born[j][r.version[i*r.nodes+j]]).Seconds())
			}
		}
	}
	per := window.Seconds() * float64(r.nodes)
	return ages, float64(r.packets) / per, float64(r.sent) / per
}

// change is how many seconds it takes in a quiet mesh until all know of a change.
func (g gossipModel) change(trials int) (took []float64) {
	g.publish = 0
	for trial := range trials {
		g.seed = uint64(trial) + 1
		r := g.start()
		about := r.dice.IntN(r.nodes)
		r.tell(about)
		for number := 0; ; number++ {
			r.round(number)
			missing := false
			for i := range r.nodes {
				missing = missing || r.version[i*r.nodes+about] == 0
			}
			if !missing {
				break
			}
		}
		took = append(took, r.now.Seconds())
	}
	return took
}

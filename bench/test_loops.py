import unittest

import loops

LISTING = """
.section .text.first,"ax",@progbits
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
        /*0010*/                   LDS R4, [R8] ;
.L_x_2:
        /*0020*/                   HFMA2 R5, R6, R7, R5 ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
        /*0040*/                   IADD3 R8, R8, 0x4, RZ ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*0070*/                   EXIT ;
.section .nv.shared.first
.section .text.second,"ax",@progbits
.L_x_4:
        /*0000*/             @UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0010*/                   BRA `(.L_x_4) ;
"""


class Loops(unittest.TestCase):
    def test_instructions_are_those_of_each_entry_point(self):
        first, second = loops.entries(LISTING)
        self.assertEqual(first.kinds, ["S2R", "LDS", "HFMA2", "BRA", "IADD3", "BRA", "BRA", "EXIT"])
        self.assertEqual((second.name, second.kinds), ("second", ["UIADD3", "BRA"]))

    def test_a_loop_around_another_and_a_branch_ahead_are_left_out(self):
        first, second = loops.entries(LISTING)
        self.assertEqual(first.innermost_loops(), [loops.Loop(2, 3)])
        self.assertEqual(second.innermost_loops(), [loops.Loop(0, 1)])

    def test_short_loops_are_not_shown(self):
        body = "\n".join(["        /*0000*/  HMUL2 R1, R2, R3 ;"] * 20)
        (entry,) = loops.entries(f'.section .text.k,"ax"\n.L_x_1:\n{body}\n        /*0140*/ BRA `(.L_x_1) ;')
        self.assertEqual(loops.describe(entry), ["k: 21 instructions", "     21 in a loop: HMUL2 20, BRA 1"])
        self.assertEqual(loops.describe(loops.entries(LISTING)[1]), ["second: 2 instructions"])


if __name__ == "__main__":
    unittest.main()
